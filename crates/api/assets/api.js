// API client. The token is stored in the session storage of this tab and sent only in the Authorization header.

const BASE = new URL("api/v1/", document.baseURI);
const TOKEN_KEY = "doctor-token";

export class ApiError extends Error {
  constructor(status, { text, code, accepted, plan }) {
    super(text);
    this.status = status;
    this.code = code;
    this.accepted = accepted;
    this.plan = plan;
  }
}

export function storedToken() {
  try {
    return sessionStorage.getItem(TOKEN_KEY);
  } catch {
    return null;
  }
}

// Stores the token; null deletes it.
export function storeToken(token) {
  if (token) sessionStorage.setItem(TOKEN_KEY, token);
  else sessionStorage.removeItem(TOKEN_KEY);
}

export function requestHeaders(extra = {}) {
  const token = storedToken();
  return token ? { ...extra, authorization: `Bearer ${token}` } : extra;
}

export function apiUrl(parts, query = {}) {
  const url = new URL(parts.map(encodeURIComponent).join("/"), BASE);
  for (const [name, value] of Object.entries(query))
    if (value !== null && value !== undefined && value !== "") url.searchParams.set(name, value);
  return url;
}

// Returns a successful response. Throws an ApiError for any other, and if the controller is unreachable.
async function checkedResponse(pending) {
  let response;
  try {
    response = await pending;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError(0, { code: "unreachable", text: "The controller does not respond." });
  }
  if (response.ok) return response;
  let body = { code: "unreadable", text: `The controller responded with status ${response.status}.` };
  try {
    body = (await response.json()).error ?? body;
  } catch {
    // The body is not JSON: the response comes from a proxy. The status is enough.
  }
  throw new ApiError(response.status, body);
}

export async function get(parts, query, signal) {
  const response = await checkedResponse(fetch(apiUrl(parts, query), { headers: requestHeaders(), signal }));
  return response.json();
}

// Fetches the pages of a list until it ends or has `maxRows` rows.
export async function getAll(parts, query, signal, maxRows = 5000) {
  const items = [];
  let cursor;
  do {
    const page = await get(parts, { ...query, limit: 500, cursor }, signal);
    items.push(...page.items);
    cursor = page.next;
  } while (cursor && items.length < maxRows);
  return { items, next: cursor };
}

export async function post(action, body) {
  const options = { method: "POST", headers: requestHeaders({ "content-type": "application/json" }), body: JSON.stringify(body) };
  const response = await checkedResponse(fetch(apiUrl(["actions", action]), options));
  return response.json();
}

export async function download(parts, name) {
  const response = await checkedResponse(fetch(apiUrl(parts), { headers: requestHeaders() }));
  saveFile(await response.blob(), name);
}

export function saveFile(blob, name) {
  const url = URL.createObjectURL(blob);
  const anchor = Object.assign(document.createElement("a"), { href: url, download: name });
  anchor.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}
