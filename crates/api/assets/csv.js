// CSV export (RFC 4180). Spreadsheets evaluate a cell that starts with = + - or @ as a formula, and names and reasons are untrusted input:
// such a cell is prefixed with an apostrophe, unless it is a number.

export function csvCell(value) {
  let text = value === null || value === undefined ? "" : String(value);
  if (/^[\s]*[=+\-@]/.test(text) && !/^-?\d+(\.\d+)?(e[+-]?\d+)?$/i.test(text)) text = `'${text}`;
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

export function toCsv(titles, rows) {
  return [titles, ...rows].map((row) => `${row.map(csvCell).join(",")}\r\n`).join("");
}
