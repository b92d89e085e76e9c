// Builds elements from names and text. Data from the server enters a page only through here, as text: nothing in these scripts turns text
// into markup.

const SVG = "http://www.w3.org/2000/svg";

function fill(node, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, hear] of Object.entries(value)) node.addEventListener(event, hear);
    else if (name === "style") for (const [key, one] of Object.entries(value)) node.style.setProperty(key, one);
    else if (name === "value") node.value = value;
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

export const el = (tag, props, ...children) => fill(document.createElement(tag), props, children);
export const svg = (tag, props, ...children) => fill(document.createElementNS(SVG, tag), props, children);

// Text of the controller: what it has between backticks (a command or a setting) is shown as code.
export const prose = (text) =>
  String(text)
    .split("`")
    .map((part, place) => (place % 2 ? el("code", {}, part) : part));

// Builds an address from parts, so that a name with special characters stays one part.
export function href(parts, query = {}) {
  const asked = new URLSearchParams(Object.entries(query).filter(([, value]) => value)).toString();
  return `#/${parts.map(encodeURIComponent).join("/")}${asked ? `?${asked}` : ""}`;
}

export const link = (parts, text, query) => el("a", { href: href(parts, query) }, text);
export const nodeLink = (name) => (name ? link(["nodes", name], name) : "");

// Replaces content and restores keyboard focus.
export function swap(place, ...content) {
  const held = place.contains(document.activeElement) ? document.activeElement.dataset.key : undefined;
  place.replaceChildren(...content.flat(Infinity).filter(Boolean));
  if (held) place.querySelector(`[data-key="${CSS.escape(held)}"]`)?.focus({ preventScroll: true });
}
