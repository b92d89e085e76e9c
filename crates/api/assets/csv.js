// Tables as CSV (RFC 4180). A spreadsheet takes a cell that begins with one of = + - @ for a formula, and names and reasons are written
// by nodes and people: such a cell gets an apostrophe in front, unless it is a plain number.

export function cell(value) {
  let text = value === null || value === undefined ? "" : String(value);
  if (/^[\s]*[=+\-@]/.test(text) && !/^-?\d+(\.\d+)?(e[+-]?\d+)?$/i.test(text)) text = `'${text}`;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

export function csv(titles, rows) {
  return [titles, ...rows].map((row) => `${row.map(cell).join(",")}\r\n`).join("");
}
