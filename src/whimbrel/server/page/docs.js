// The API's page: what /openapi.json says, route by route. Text is only ever set as text.

const KEY = sessionStorage.getItem("whimbrel.key"); // given on the chat page
const routes = document.getElementById("routes");

function made(tag, words, ...children) {
  const element = document.createElement(tag);
  if (words) element.textContent = words;
  element.append(...children);
  return element;
}

function kind(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.anyOf ?? schema.oneOf) return (schema.anyOf ?? schema.oneOf).map(kind).join(" | ");
  if (schema.type === "array") return `list of ${kind(schema.items ?? {})}`;
  const bounds = [schema.minimum, schema.maximum].some((bound) => bound !== undefined);
  return (schema.type ?? "any") + (bounds ? ` from ${schema.minimum ?? "-∞"} to ${schema.maximum ?? "∞"}` : "");
}

function table(schema) {
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) => {
    const needed = schema.required?.includes(name) ? " (needed)" : "";
    const row = made("tr", "", made("th", name), made("td", kind(field) + needed), made("td", field.description ?? ""));
    row.firstChild.scope = "row";
    return row;
  });
  return made("table", "", ...rows);
}

function section(path, method, route, schemas) {
  const found = made("section", "", made("h2", `${method.toUpperCase()} ${path}`), made("p", route.summary ?? ""));
  if (route.description) found.append(made("p", route.description));
  const body = route.requestBody?.content?.["application/json"]?.schema;
  if (body) found.append(made("h3", kind(body)), table(body.$ref ? schemas[kind(body)] : body));
  const answers = Object.entries(route.responses ?? {}).map(([status, answer]) => made("li", `${status}: ${answer.description}`));
  found.append(made("ul", "", ...answers));
  return found;
}

const answer = await fetch("/openapi.json", KEY ? { headers: { Authorization: `Bearer ${KEY}` } } : {});
if (answer.ok) {
  const { paths, components } = await answer.json();
  const sections = Object.entries(paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, route]) => section(path, method, route, components.schemas)),
  );
  const used = Object.entries(components.schemas).map(([name, schema]) => made("section", "", made("h2", name), table(schema)));
  routes.replaceChildren(...sections, made("h1", "Schemas"), ...used);
} else {
  routes.replaceChildren(made("p", answer.status === 401 ? "This server asks for its API key: give it on the chat page, in this tab." : `the server answered with ${answer.status}`));
}
