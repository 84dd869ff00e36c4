// Presses the head of every column of every table, and tells which rows are not in order after it.
(() => {
  const unsorted = [];
  let columns = 0;
  for (const table of document.querySelectorAll("table.sorts"))
    [...table.querySelectorAll("th")].forEach((head, column) => {
      columns += 1;
      const isNumber = head.classList.contains("number");
      const text = new Intl.Collator("en", { numeric: true });
      head.querySelector("button").click();
      const order = head.ariaSort;
      const values = [...table.tBodies[0].rows]
        .map((row) => row.cells[column].dataset.value).filter(Boolean);
      if (order !== (isNumber ? "descending" : "ascending"))
        unsorted.push(`${head.innerText}: ${order}`);
      for (let n = 1; n < values.length; n += 1) {
        const ok = isNumber
          ? Number(values[n - 1]) >= Number(values[n])
          : text.compare(values[n - 1], values[n]) <= 0;
        if (!ok) unsorted.push(`${head.innerText}: ${values[n - 1]} before ${values[n]}`);
      }
    });
  return { columns, unsorted };
})()
