// Tables as CSV (RFC 4180). Spreadsheets treat a cell that starts with = + - or @ as a formula, and names and reasons come from nodes and
// people: such a cell is prefixed with an apostrophe, unless it is a plain number.

export function cell(value) {
  let text = value === null || value === undefined ? "" : String(value);
  if (/^[\s]*[=+\-@]/.test(text) && !/^-?\d+(\.\d+)?(e[+-]?\d+)?$/i.test(text)) text = `'${text}`;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

export function csv(titles, rows) {
  return [titles, ...rows].map((row) => `${row.map(cell).join(",")}\r\n`).join("");
}
