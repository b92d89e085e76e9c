// Tables with sortable columns, pages and CSV export. Sort order and page number are stored in the URL.

import { saveFile } from "./api.js";
import { toCsv } from "./csv.js";
import { el, inlineCode, replaceContent } from "./dom.js";
import { plural } from "./format.js";

const ROWS_PER_PAGE = 100;

const cellContent = (content) => (typeof content === "string" ? inlineCode(content) : content);

function compare(a, b) {
  if (a === b) return 0;
  if (a === null || a === undefined || a === "") return 1;
  if (b === null || b === undefined || b === "") return -1;
  if (typeof a === "number" && typeof b === "number") return a - b;
  return String(a).localeCompare(String(b), "en", { numeric: true });
}

// columns: { key, title, value(row) for sorting and CSV, sortValue(row) for sorting and cell(row) for display if they differ, alignRight,
// wide }. `name` is the name of the CSV file and the prefix of the URL parameters. `defaultSort` is a column key, with a leading `-` for
// descending order. `loadMore` fetches older rows.
export function table(
  page,
  { name, caption, columns, rows, defaultSort = null, emptyText = "No rows.", loadMore = null, pageSize = ROWS_PER_PAGE },
) {
  const container = el("div", { class: "table" });
  const [sortKey, pageKey] = [`${name}.sort`, `${name}.page`];

  function render() {
    const sort = page.query.get(sortKey) ?? defaultSort;
    const [key, descending] = sort?.startsWith("-") ? [sort.slice(1), true] : [sort, false];
    const sortColumn = columns.find((column) => column.key === key);
    const sortValue = sortColumn?.sortValue ?? sortColumn?.value;
    const sorted = sortColumn ? [...rows].sort((a, b) => (descending ? -1 : 1) * compare(sortValue(a), sortValue(b))) : rows;
    const pageCount = Math.max(1, Math.ceil(sorted.length / pageSize));
    const pageNumber = Math.min(pageCount, Math.max(1, Number(page.query.get(pageKey) ?? 1) || 1));
    const visible = sorted.slice((pageNumber - 1) * pageSize, pageNumber * pageSize);
    const goToPage = (number) => {
      page.setParam(pageKey, number > 1 ? String(number) : null);
      render();
    };
    const heading = (column) => {
      const isSortColumn = column.key === key;
      const toggleSort = () => {
        page.setParam(sortKey, isSortColumn && !descending ? `-${column.key}` : column.key);
        page.setParam(pageKey, null);
        render();
      };
      const button = el(
        "button",
        { type: "button", class: "sort", "data-key": `${name}-${column.key}`, on: { click: toggleSort } },
        column.title,
        el("span", { "aria-hidden": "true" }, isSortColumn ? (descending ? " ▾" : " ▴") : ""),
      );
      const ariaSort = isSortColumn ? (descending ? "descending" : "ascending") : "none";
      return el("th", { scope: "col", class: column.alignRight ? "right" : "", "aria-sort": ariaSort }, button);
    };
    const cell = (item, column) => {
      const content = (column.cell ?? column.value)(item) ?? "";
      const classes = [column.alignRight && "right", column.wide && "wide"].filter(Boolean).join(" ");
      // A single element, because on a narrow screen the cell is a grid of the column title and its content.
      return el(
        "td",
        { class: classes || null, "data-title": column.title },
        content === "" ? null : el("div", {}, cellContent(content)),
      );
    };
    const row = (item) => el("tr", {}, ...columns.map((column) => cell(item, column)));
    const exportCsv = () => {
      const text = toCsv(
        columns.map((column) => column.title),
        sorted.map((item) => columns.map((column) => column.value(item))),
      );
      saveFile(new Blob([text], { type: "text/csv;charset=utf-8" }), `${name}.csv`);
    };
    const pageButton = (direction, text, target) =>
      el(
        "button",
        {
          type: "button",
          disabled: target < 1 || target > pageCount,
          "data-key": `${name}-${direction}-page`,
          on: { click: () => goToPage(target) },
        },
        text,
      );
    const footer = el(
      "div",
      { class: "table-footer" },
      el("span", { class: "dim" }, plural(rows.length, "row"), loadMore ? " so far" : ""),
      pageCount > 1 &&
        el(
          "span",
          { class: "pages" },
          pageButton("previous", "‹ Previous", pageNumber - 1),
          ` ${pageNumber} of ${pageCount} `,
          pageButton("next", "Next ›", pageNumber + 1),
        ),
      loadMore && el("button", { type: "button", "data-key": `${name}-more`, on: { click: loadMore } }, "Load older"),
      el("button", { type: "button", class: "quiet", "data-key": `${name}-csv`, on: { click: exportCsv } }, "Save as CSV"),
    );
    if (!rows.length) {
      replaceContent(container, el("p", { class: "placeholder" }, emptyText));
      return;
    }
    replaceContent(
      container,
      el(
        "div",
        { class: "scroll", tabindex: "0", role: "region", "aria-label": caption },
        el(
          "table",
          {},
          el("caption", { class: "visually-hidden" }, caption),
          el("thead", {}, el("tr", {}, ...columns.map(heading))),
          el("tbody", {}, ...visible.map(row)),
        ),
      ),
      footer,
    );
  }

  render();
  return container;
}
