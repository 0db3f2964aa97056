// The table of methods: sorting, and the choice of the schedule shown.

function sortTable() {
  const headers = [...document.querySelectorAll("#rows thead th")];
  const body = document.querySelector("#rows tbody");
  // An infeasible row has its reason in place of the cells behind its name.
  const keyOf = (row, column) => {
    const text = column === 0 || !row.classList.contains("infeasible") ? row.cells[column]?.dataset.v : undefined;
    return column === 0 ? text : text === undefined ? NaN : Number(text);
  };
  headers.forEach((header, column) => {
    const button = element("button", "", header.textContent);
    button.type = "button";
    header.replaceChildren(button);
    header.setAttribute("aria-sort", column === 1 ? "ascending" : "none");
    button.addEventListener("click", () => {
      const down = header.getAttribute("aria-sort") === "ascending";
      for (const other of headers) other.setAttribute("aria-sort", "none");
      header.setAttribute("aria-sort", down ? "descending" : "ascending");
      const rows = [...body.rows].map((row) => [keyOf(row, column), row]);
      rows.sort(([a], [b]) => {
        if (a !== a || b !== b) return (a !== a) - (b !== b); // without a number: always last
        return (a > b) - (a < b);
      });
      if (down) {
        const numbered = rows.filter(([key]) => key === key).reverse();
        rows.splice(0, numbered.length, ...numbered);
      }
      body.append(...rows.map(([, row]) => row));
    });
  });
}

function buildPicker() {
  const picker = document.getElementById("picker");
  const buttons = schedules.map((schedule, index) => {
    const button = element("button", "", schedule.method);
    button.type = "button";
    button.append(element("b", "", seconds(schedule.step_time_s)));
    button.addEventListener("click", () => show(index));
    for (const row of document.querySelectorAll("#rows tbody tr")) {
      if (row.dataset.schedule !== schedule.method) continue;
      row.dataset.shown = "";
      row.title = "show this schedule";
      row.addEventListener("click", () => {
        show(index);
        picker.scrollIntoView({ behavior: "smooth" });
      });
    }
    return button;
  });
  picker.append(...buttons);
  picker.hidden = schedules.length === 0;
  onShown(() => buttons.forEach((button, i) => button.setAttribute("aria-pressed", String(i === state.shown))));
}

function copyCommand() {
  const button = document.getElementById("copy");
  if (!button) return;
  button.addEventListener("click", () => {
    const range = document.createRange();
    range.selectNodeContents(document.getElementById("command"));
    getSelection().removeAllRanges();
    getSelection().addRange(range);
    document.execCommand("copy"); // the clipboard API needs https, this page is a file
    button.textContent = "copied";
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  });
}

// On a screen too narrow for the table, say that it goes on; keep what is scrolled to clear of the bar of schedules.
function followWidth() {
  const table = document.querySelector("#rows .scroll");
  const picker = document.getElementById("picker");
  const measure = () => {
    document.querySelector("#rows .more").hidden = table.scrollWidth <= table.clientWidth + 1;
    document.documentElement.style.setProperty("--picker", `${picker.offsetHeight}px`);
  };
  new ResizeObserver(measure).observe(table);
  measure();
}

sortTable();
buildPicker();
copyCommand();
followWidth();
