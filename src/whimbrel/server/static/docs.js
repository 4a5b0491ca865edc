// The API page: renders /openapi.json route by route. Text is only ever set as textContent.

const KEY = sessionStorage.getItem("whimbrel.key"); // entered on the chat page
const routes = document.getElementById("routes");

function element(tag, text, ...children) {
  const node = document.createElement(tag);
  if (text) node.textContent = text;
  node.append(...children);
  return node;
}

function bounds(schema) {
  const limits = { "≥": schema.minimum, ">": schema.exclusiveMinimum, "≤": schema.maximum, "<": schema.exclusiveMaximum };
  const present = Object.entries(limits).filter(([, limit]) => limit !== undefined);
  return present.length ? ` (${present.map(([sign, limit]) => `${sign} ${limit}`).join(", ")})` : "";
}

function typeName(schema) {
  if (schema.$ref) return schema.$ref.split("/").pop();
  if (schema.const !== undefined) return JSON.stringify(schema.const);
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(" | ");
  if (schema.anyOf ?? schema.oneOf) return (schema.anyOf ?? schema.oneOf).map(typeName).join(" | ");
  if (schema.type === "array") return `list of ${typeName(schema.items ?? {})}`;
  return (schema.type ?? "any") + bounds(schema);
}

function fieldTable(schema) {
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) => {
    const required = schema.required?.includes(name) ? " (required)" : "";
    const row = element("tr", "", element("th", name), element("td", typeName(field) + required), element("td", field.description ?? ""));
    row.firstChild.scope = "row";
    return row;
  });
  return element("table", "", ...rows);
}

function routeSection(path, method, route, schemas) {
  const section = element("section", "", element("h2", `${method.toUpperCase()} ${path}`), element("p", route.summary ?? ""));
  if (route.description) section.append(element("p", route.description));
  const body = route.requestBody?.content?.["application/json"]?.schema;
  if (body) section.append(element("h3", typeName(body)), fieldTable(body.$ref ? schemas[typeName(body)] : body));
  const responses = Object.entries(route.responses ?? {}).map(([status, response]) => element("li", `${status}: ${response.description}`));
  section.append(element("ul", "", ...responses));
  return section;
}

const response = await fetch("/openapi.json", KEY ? { headers: { Authorization: `Bearer ${KEY}` } } : {});
if (response.ok) {
  const { paths, components } = await response.json();
  const sections = Object.entries(paths).flatMap(([path, methods]) =>
    Object.entries(methods).map(([method, route]) => routeSection(path, method, route, components.schemas)),
  );
  const schemas = Object.entries(components.schemas).map(([name, schema]) => element("section", "", element("h2", name), fieldTable(schema)));
  routes.replaceChildren(...sections, element("h1", "Schemas"), ...schemas);
} else {
  const message = response.status === 401 ? "This server requires an API key: enter it on the chat page in this tab." : `HTTP status ${response.status}`;
  routes.replaceChildren(element("p", message));
}
