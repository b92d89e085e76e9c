// Creates elements from tag names and text. All server data enters a page through this module, as text: no script parses text as markup.

const SVG = "http://www.w3.org/2000/svg";

function applyProps(node, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) node.addEventListener(event, listener);
    else if (name === "style") for (const [property, text] of Object.entries(value)) node.style.setProperty(property, text);
    else if (name === "value") node.value = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export const el = (tag, props, ...children) => applyProps(document.createElement(tag), props, children);
export const svg = (tag, props, ...children) => applyProps(document.createElementNS(SVG, tag), props, children);

// Renders text of the controller: a command or setting between backticks becomes a <code> element.
export const inlineCode = (text) =>
  String(text)
    .split("`")
    .map((part, index) => (index % 2 ? el("code", {}, part) : part));

// Removes the backticks, where no element can be used: tooltips and labels.
export const plainText = (text) => String(text).replaceAll("`", "");

// Builds a link to a page. Path segments are escaped, so that a name with special characters stays one segment.
export function href(parts, query = {}) {
  const search = new URLSearchParams(Object.entries(query).filter(([, value]) => value)).toString();
  return `#/${parts.map(encodeURIComponent).join("/")}${search ? `?${search}` : ""}`;
}

export const link = (parts, text, query) => el("a", { href: href(parts, query) }, text);
export const nodeLink = (name) => (name ? link(["nodes", name], name) : "");

// Replaces the content of an element and restores keyboard focus, by `data-key`.
export function replaceContent(container, ...content) {
  const focusedKey = container.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  container.replaceChildren(...content.flat(Infinity).filter(Boolean));
  if (focusedKey) container.querySelector(`[data-key="${CSS.escape(focusedKey)}"]`)?.focus({ preventScroll: true });
}
