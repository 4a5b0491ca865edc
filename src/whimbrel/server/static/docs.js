// The API page: renders /openapi.json route by route. Text is only ever set as textContent.

import { checkAccess, copyButton, element, request } from "/page/client.js";

const routes = document.getElementById("routes");

function bounds(schema) {
  const limits = { "≥": schema.minimum, ">": schema.exclusiveMinimum, "≤": schema.maximum, "<": schema.exclusiveMaximum };
  const present = Object.entries(limits).filter(([, limit]) => Math.abs(limit) < 2 ** 31 - 1); // not the range of the type
  return present.length ? ` (${present.map(([sign, limit]) => `${sign} ${limit}`).join(", ")})` : "";
}

const schemaName = ({ $ref }) => $ref.split("/").pop();

// The type as text and links to schemas.
function typeNodes(schema) {
  if (schema.$ref) return [element("a", { href: `#${schemaName(schema)}`, textContent: schemaName(schema) })];
  if (schema.const !== undefined) return [JSON.stringify(schema.const)];
  if (schema.enum) return [schema.enum.map((value) => JSON.stringify(value)).join(" | ")];
  const options = schema.anyOf ?? schema.oneOf;
  if (options) return options.flatMap((option, index) => [index ? " | " : "", ...typeNodes(option)]);
  if (schema.type === "array") return ["list of ", ...typeNodes(schema.items ?? {})];
  return [(schema.type ?? "any") + bounds(schema)];
}

function fieldTable(schema) {
  const rows = Object.entries(schema.properties ?? {}).map(([name, field]) => {
    const type = element("td", { className: "type" }, ...typeNodes(field));
    if (schema.required?.includes(name)) type.append(" ", element("span", { className: "required", textContent: "required" }));
    const header = element("th", { scope: "row" }, element("code", { textContent: name }));
    return element("tr", {}, header, type, element("td", { textContent: field.description ?? "" }));
  });
  return element("table", {}, element("tbody", {}, ...rows));
}

// Bodies of the example requests.
const EXAMPLE_BODIES = {
  "/v1/completions": (model) => ({ model, prompt: "Once upon a time", max_tokens: 64 }),
  "/v1/chat/completions": (model) => ({ model, messages: [{ role: "user", content: "Hello!" }], max_tokens: 64 }),
};

function curlExample(path, api) {
  const [model] = api.components.schemas.CompletionRequest.properties.model.enum;
  const parts = [`curl ${location.origin}${path.replace("{name}", encodeURIComponent(model))}`];
  const needsKey = api.components.securitySchemes && path !== "/health";
  if (needsKey) parts.push('-H "Authorization: Bearer $WHIMBREL_API_KEY"');
  if (EXAMPLE_BODIES[path]) {
    const body = JSON.stringify(EXAMPLE_BODIES[path](model), null, 2).replaceAll("'", "'\\''").replaceAll("\n", "\n  ");
    parts.push("-H 'Content-Type: application/json'", `-d '${body}'`);
  }
  const command = parts.join(" \\\n  ");
  const header = element("div", { className: "code-header" }, element("span", { textContent: "curl" }), copyButton(command));
  const code = element("pre", { textContent: command, tabIndex: 0, role: "region", ariaLabel: `Example of ${path}` });
  return element("div", { className: "code" }, header, code);
}

function bodyName(route) {
  const schema = route.requestBody?.content["application/json"].schema;
  return schema && schemaName(schema);
}

function routeSection(path, method, route, api) {
  const title = element("h2", {}, element("span", { className: "method", textContent: method.toUpperCase() }), " ", path);
  const summary = route.description ?? route.summary ?? "";
  const section = element("section", { id: anchor(method, path) }, title, element("p", { textContent: summary }));
  section.append(element("h3", { textContent: "Example" }), curlExample(path, api));
  const body = bodyName(route);
  if (body) section.append(element("h3", { id: body, textContent: `Request body: ${body}` }), fieldTable(api.components.schemas[body]));
  const responses = Object.entries(route.responses ?? {}).map(([status, { description, content }]) => {
    const schema = content?.["application/json"]?.schema;
    return element("li", {}, `${status}: ${description}`, ...(schema?.$ref ? [" (", ...typeNodes(schema), ")"] : []));
  });
  section.append(element("h3", { textContent: "Responses" }), element("ul", { className: "responses" }, ...responses));
  return section;
}

const anchor = (method, path) => `${method}-${path.replace(/[^a-z]+/g, "-")}`;

function show(api) {
  const all = Object.entries(api.paths).flatMap(([path, methods]) => Object.entries(methods).map(([method, route]) => ({ path, method, route })));
  const link = ({ path, method }) => element("li", {}, element("a", { href: `#${anchor(method, path)}`, textContent: `${method.toUpperCase()} ${path}` }));
  const contents = element("ul", { className: "contents" }, ...all.map(link));
  const sections = all.map(({ path, method, route }) => routeSection(path, method, route, api));
  const bodies = new Set(all.map(({ route }) => bodyName(route))); // shown with their routes
  const schemas = Object.entries(api.components.schemas).filter(([name]) => !bodies.has(name)).map(([name, schema]) =>
    element("section", { id: name }, element("h3", { textContent: name }), element("p", { textContent: schema.description ?? "" }), fieldTable(schema)),
  );
  const summary = element("p", { textContent: api.info.summary ?? "" });
  routes.replaceChildren(summary, contents, ...sections, element("section", {}, element("h2", { textContent: "Schemas" }), ...schemas));
}

try {
  await checkAccess();
  show(await (await request("/openapi.json")).json());
} catch (error) {
  const message = error.status === 401 ? `${error.message} Open the chat page in this tab and enter it under Settings.` : error.message;
  routes.replaceChildren(element("p", { textContent: message }));
}
