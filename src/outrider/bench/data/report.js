// A click (or Enter) on a column's name sorts by it: numbers in descending order, then reversed; empty cells last.
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.tHead.rows[0].cells];
  const value = (row, i) => row.cells[i].dataset.sort ?? row.cells[i].textContent;
  const compare = (a, b) => (isNaN(a) || isNaN(b) ? a.localeCompare(b, undefined, { numeric: true }) : a - b);
  heads.forEach((head, i) =>
    head.firstElementChild.addEventListener("click", () => {
      const body = table.tBodies[0];
      const rows = [...body.rows];
      const numbers = rows.some((row) => "sort" in row.cells[i].dataset);
      const falls = (head.ariaSort ?? "none") === "none" ? numbers : head.ariaSort === "ascending";
      heads.forEach((other) => other.setAttribute("aria-sort", "none"));
      head.setAttribute("aria-sort", falls ? "descending" : "ascending");
      const full = (row) => (numbers ? "sort" in row.cells[i].dataset : value(row, i) !== "");
      const order = rows.filter(full).sort((a, b) => (falls ? -1 : 1) * compare(value(a, i), value(b, i)));
      body.append(...order, ...rows.filter((row) => !full(row)));
    }),
  );
}
