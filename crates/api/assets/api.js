// API requests. The token is kept for this tab only and is sent only in the header.

const BASE = new URL("api/v1/", document.baseURI);
const KEPT = "doctor-token";

export class Refused extends Error {
  constructor(status, told) {
    super(told.text);
    this.status = status;
    this.code = told.code;
    this.accepted = told.accepted;
    this.plan = told.plan;
  }
}

export function token() {
  try {
    return sessionStorage.getItem(KEPT);
  } catch {
    return null;
  }
}

export function keepToken(text) {
  if (text) sessionStorage.setItem(KEPT, text);
  else sessionStorage.removeItem(KEPT);
}

export function headers(more = {}) {
  const known = token();
  return known ? { ...more, authorization: `Bearer ${known}` } : more;
}

export function address(parts, query = {}) {
  const url = new URL(parts.map(encodeURIComponent).join("/"), BASE);
  for (const [name, value] of Object.entries(query))
    if (value !== null && value !== undefined && value !== "") url.searchParams.set(name, value);
  return url;
}

async function answered(asked) {
  let response;
  try {
    response = await asked;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0, { code: "unreachable", text: "The controller does not respond." });
  }
  if (response.ok) return response;
  let told = { code: "unreadable", text: `The controller responded with status ${response.status}.` };
  try {
    told = (await response.json()).error ?? told;
  } catch {
    // A proxy in between sends its own body; the status suffices.
  }
  throw new Refused(response.status, told);
}

export async function get(parts, query, signal) {
  const response = await answered(fetch(address(parts, query), { headers: headers(), signal }));
  return response.json();
}

// Fetches all pages of a list, up to `most` rows, so that one table can show it.
export async function all(parts, query, signal, most = 5000) {
  const items = [];
  let cursor;
  do {
    const page = await get(parts, { ...query, limit: 500, cursor }, signal);
    items.push(...page.items);
    cursor = page.next;
  } while (cursor && items.length < most);
  return { items, next: cursor };
}

export async function post(action, body) {
  const options = { method: "POST", headers: headers({ "content-type": "application/json" }), body: JSON.stringify(body) };
  const response = await answered(fetch(address(["actions", action]), options));
  return response.json();
}

export async function download(parts, name) {
  const response = await answered(fetch(address(parts), { headers: headers() }));
  save(await response.blob(), name);
}

export function save(blob, name) {
  const url = URL.createObjectURL(blob);
  const anchor = Object.assign(document.createElement("a"), { href: url, download: name });
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
