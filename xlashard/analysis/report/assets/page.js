"use strict";
(() => {
  const root = document.documentElement;
  const all = (selector, within = document) => [...within.querySelectorAll(selector)];
  root.classList.add("scripts");

  // A page that was opened from a file may have nowhere to remember the choice.
  const memory = {
    get() { try { return localStorage.getItem("xlashard-theme"); } catch { return null; } },
    set(theme) { try { localStorage.setItem("xlashard-theme", theme); } catch { /* not kept */ } },
  };

  function showTheme(theme) {
    if (theme === "auto") delete root.dataset.theme; else root.dataset.theme = theme;
    for (const button of all("[data-theme-choice]"))
      button.setAttribute("aria-pressed", String(button.dataset.themeChoice === theme));
  }

  for (const button of all("[data-theme-choice]"))
    button.addEventListener("click", () => {
      memory.set(button.dataset.themeChoice);
      showTheme(button.dataset.themeChoice);
    });
  const kept = memory.get();
  showTheme(["light", "dark"].includes(kept) ? kept : "auto");

  // The fragment has a place, and the filters of tables: #lines&lines=dot&lines:kind=fusion. A file
  // has a fragment, too, and to change it loads nothing.
  const fields = all(".filters :is(input, select)");
  const keyOf = (field) => field.closest(".card").id + (field.dataset.key ? `:${field.dataset.key}` : "");
  const address = (place) => {
    const used = fields.filter((field) => field.value);
    return [place, ...used.map((f) => `${keyOf(f)}=${encodeURIComponent(f.value)}`)].join("&");
  };
  const placeOf = () => decodeURIComponent(location.hash.slice(1).split("&")[0]);
  function restore() {
    const filters = new URLSearchParams(location.hash.split("&").slice(1).join("&"));
    for (const field of fields) {
      const wanted = filters.get(keyOf(field)) ?? "";
      if (field.value === wanted) continue;
      field.value = wanted;
      filter(field.closest(".finds"));
    }
    showPanel();
  }
  addEventListener("click", (event) => {
    const link = event.target.closest('a[href^="#"]');
    if (!link || event.ctrlKey || event.metaKey || event.shiftKey) return;
    event.preventDefault();
    location.hash = address(link.getAttribute("href").slice(1));
    showPanel();
  });

  // One panel at a time: the one that the address names, or in which it names a section or row.
  const panels = all(".panel");
  function showPanel() {
    const place = document.getElementById(placeOf());
    const wanted = place?.closest(".panel") ?? panels[0];
    for (const panel of panels) panel.hidden = panel !== wanted;
    for (const link of all(".tabs a"))
      link.setAttribute("aria-current", String(decodeURIComponent(link.hash) === `#${wanted.id}`));
    const folded = place?.closest("details") ?? place?.querySelector(":scope > details");
    if (folded) folded.open = true;
    for (const one of all(".pointed")) one.classList.remove("pointed");
    if (!place || place === wanted) return;
    place.classList.add("pointed");
    place.scrollIntoView();
    place.focus({ preventScroll: true });
  }
  const shownPanel = () => panels.find((panel) => !panel.hidden);

  for (const button of all(".download"))
    button.addEventListener("click", () => {
      const found = all("script[data-panel]");
      const data = found.find((one) => one.dataset.panel === shownPanel().id) ?? found[0];
      if (!data) return;
      const text = JSON.stringify(JSON.parse(data.textContent), null, 2) + "\n";
      const link = document.createElement("a");
      link.href = URL.createObjectURL(new Blob([text], { type: "application/json" }));
      link.download = data.dataset.name;
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1000);
    });

  for (const button of all(".copies")) {
    const words = button.textContent;
    button.addEventListener("click", async () => {
      const data = all("script[data-summary]").find((one) => one.dataset.summary === shownPanel().id);
      try {
        await navigator.clipboard.writeText(JSON.parse(data.textContent));
        button.textContent = "Copied";
      } catch { button.textContent = "The browser allows no copy"; }
      setTimeout(() => { button.textContent = words; }, 2000);
    });
  }

  // Numbers as the rest of the page has them; half goes to the even neighbour, as in Python.
  function fixed(number, digits) {
    const scaled = number * 10 ** digits;
    const half = scaled % 1 === 0.5 && Math.floor(scaled) % 2 === 0;
    return (half ? Math.floor(scaled) / 10 ** digits : number).toFixed(digits);
  }
  const ways = {
    bytes(n) {
      for (const unit of ["B", "KiB", "MiB", "GiB"]) {
        if (n < 1024) return `${fixed(n, unit === "B" ? 0 : 1)} ${unit}`;
        n /= 1024;
      }
      return `${fixed(n, 1)} TiB`;
    },
    seconds(n) {
      for (const [unit, factor] of [["s", 1], ["ms", 1e3], ["µs", 1e6]])
        if (n * factor >= 1) return `${fixed(n * factor, unit === "s" && n < 10 ? 2 : 1)} ${unit}`;
      return n ? `${fixed(n * 1e9, 0)} ns` : "0 s";
    },
  };

  function sortBy(table, column) {
    const heads = all("thead th", table);
    const head = heads[column];
    const isNumber = head.classList.contains("number");
    const before = head.getAttribute("aria-sort");
    const first = isNumber ? "descending" : "ascending";
    const other = isNumber ? "ascending" : "descending";
    const order = before === first ? other : first;
    const sign = order === "ascending" ? 1 : -1;
    const value = (row) => row.cells[column].dataset.value;
    const text = new Intl.Collator("en", { numeric: true });
    const compare = (a, b) => {
      if (!value(a) || !value(b)) return (value(a) ? 0 : 1) - (value(b) ? 0 : 1);
      return sign * (isNumber ? value(a) - value(b) : text.compare(value(a), value(b)));
    };
    for (const one of heads) one.setAttribute("aria-sort", one === head ? order : "none");
    table.tBodies[0].append(...[...table.tBodies[0].rows].sort(compare));
  }

  for (const table of all("table.sorts"))
    all("thead th", table).forEach((head, column) =>
      head.firstElementChild.addEventListener("click", () => sortBy(table, column)));

  function filter(place) {
    const words = place.querySelector("input").value.toLowerCase().split(/\s+/).filter(Boolean);
    const wanted = all("select", place).filter((select) => select.value);
    const rows = all("tbody tr", place);
    for (const row of rows) {
      const text = row.dataset.search.toLowerCase();
      row.hidden = !(
        words.every((word) => text.includes(word)) &&
        wanted.every((s) => (row.dataset[s.dataset.key] ?? "").split("|").includes(s.value))
      );
    }
    const left = rows.filter((row) => !row.hidden);
    const sums = (place.querySelector("table").dataset.sums ?? "").split("|").filter(Boolean);
    const parts = sums.map((sum, n) => {
      const [word, way] = sum.split(":");
      const total = left.reduce((t, row) => t + Number(row.dataset.sums.split("|")[n]), 0);
      return `${word} ${ways[way](total)}`;
    });
    const isAll = left.length === rows.length;
    const count = `${left.length.toLocaleString("en-US")} of ${rows.length.toLocaleString("en-US")}`;
    place.querySelector(".count").textContent = isAll ? "" : [count, ...parts].join(" · ");
  }

  for (const field of fields)
    field.addEventListener("input", () => {
      filter(field.closest(".finds"));
      history.replaceState(null, "", `#${address(placeOf())}`);
    });
  addEventListener("hashchange", restore);
  restore();

  for (const button of all("button.shows"))
    button.addEventListener("click", () => {
      const option = all("option", button.closest(".card")).find((one) => one.value === button.value);
      const choice = option?.closest("select");
      if (!choice) return;
      choice.value = choice.value === button.value ? "" : button.value;
      choice.dispatchEvent(new Event("input", { bubbles: true }));
    });

  // A chip that is pointed at says where it is, and shows those that it talks to along the axis.
  const placesOf = (chip) => chip.dataset.mesh.split(",");
  function choose(torus, chip) {
    for (const one of all(".chosen, .alike", torus)) one.classList.remove("chosen", "alike");
    const status = torus.querySelector(".chip-status");
    status.textContent = "";
    if (!chip) return;
    const axis = Number(torus.querySelector("input:checked").value);
    const names = all(".choices bdi", torus).map((name) => name.textContent);
    const places = placesOf(chip);
    const others = (one) => placesOf(one).filter((_, n) => n !== axis).join();
    const group = all(".chips g", torus).filter((one) => others(one) === others(chip));
    for (const one of group) one.classList.add("alike");
    chip.classList.add("chosen");
    const { at, core, slice } = chip.dataset;
    const [x, y] = at.split(",");
    const nodes = torus.hasAttribute("data-nodes");
    const where = [nodes ? `GPU ${x} of node ${y}` : `chip (${at.replaceAll(",", ", ")})`];
    if (core !== undefined) where.push(`device ${core}`);
    if (torus.querySelector(".slice h4")) where.push(`slice ${slice}`);
    const mesh = names.map((name, n) => `${name} ${places[n]}`).join(", ");
    status.textContent =
      `${where.join(", ")}: ${mesh}. Its group along ${names[axis]}: ${group.length} of those drawn.`;
  }

  function step(torus, key) {
    const chips = all(".chips g", torus);
    const now = torus.querySelector(".chosen");
    if (!now) return chips[0];
    const [x, y, z] = now.dataset.at.split(",").map(Number);
    const moves = {
      ArrowLeft: [-1, 0, 0], ArrowRight: [1, 0, 0], ArrowUp: [0, -1, 0], ArrowDown: [0, 1, 0],
      PageUp: [0, 0, -1], PageDown: [0, 0, 1],
    };
    if (!moves[key]) return null;
    const at = [x, y, z].map((place, n) => place + moves[key][n]).join();
    return chips.find((c) => c.dataset.at === at && c.dataset.slice === now.dataset.slice) ?? now;
  }

  for (const torus of all(".torus:has(.choices)")) {
    const chips = torus.querySelector(".slices");
    chips.tabIndex = 0;
    chips.setAttribute("role", "group");
    chips.setAttribute("aria-label", "Chips: arrow keys go from one to the next");
    chips.addEventListener("pointermove", (event) => choose(torus, event.target.closest(".chips g")));
    chips.addEventListener("pointerleave", () => choose(torus, null));
    chips.addEventListener("blur", () => choose(torus, null));
    chips.addEventListener("keydown", (event) => {
      const next = step(torus, event.key);
      if (!next) return;
      event.preventDefault();
      choose(torus, next);
    });
  }

  // What is pointed at, and all that is of the same operations: bars of the timeline, rows.
  function light(place) {
    for (const one of all(".lit")) one.classList.remove("lit");
    const one = place?.closest?.("[data-lights]");
    if (!one) return;
    for (const other of all("[data-lights]", one.closest(".panel")))
      other.classList.toggle("lit", other.dataset.lights === one.dataset.lights);
  }
  for (const kind of ["pointerover", "focusin"])
    addEventListener(kind, (event) => light(event.target));

  // The timeline is as wide as the zoom says, and scrolls in its box.
  function zoom(timeline, factor, at = 0.5) {
    const box = timeline.querySelector(".scroller");
    const canvas = timeline.querySelector(".canvas");
    const before = Number(canvas.dataset.zoom ?? 1);
    const after = Math.min(512, Math.max(1, factor ? before * factor : 1));
    const middle = (box.scrollLeft + at * box.clientWidth) / before;
    canvas.dataset.zoom = after;
    canvas.style.width = `${after * 100}%`;
    box.scrollLeft = middle * after - at * box.clientWidth;
  }

  function chooseSpan(timeline, span, follow = false) {
    for (const one of all(".chosen", timeline)) one.classList.remove("chosen");
    timeline.querySelector(".span-status").textContent =
      span?.querySelector("title").textContent ?? "";
    if (!span) return;
    span.classList.add("chosen");
    light(span);
    if (!follow) return;
    const box = timeline.querySelector(".scroller");
    const [inside, outside] = [span, box].map((one) => one.getBoundingClientRect());
    if (inside.left < outside.left || inside.right > outside.right)
      box.scrollLeft += inside.left - outside.left - outside.width / 4;
  }

  const middleOf = (span) => parseFloat(span.getAttribute("x")) + parseFloat(span.getAttribute("width")) / 2;
  function nextSpan(timeline, key) {
    const rows = all(".row", timeline);
    const now = timeline.querySelector(".chosen");
    if (!now) return key.startsWith("Arrow") ? timeline.querySelector(".row .span") : null;
    const row = now.closest(".row");
    const spans = all(".span", row);
    const step = { ArrowLeft: -1, ArrowRight: 1 }[key];
    if (step) return spans[spans.indexOf(now) + step] ?? now;
    const other = rows[rows.indexOf(row) + ({ ArrowUp: -1, ArrowDown: 1 }[key] ?? 0)];
    if (!key.startsWith("Arrow")) return null;
    const away = (span) => Math.abs(middleOf(span) - middleOf(now));
    return other ? all(".span", other).reduce((a, b) => (away(b) < away(a) ? b : a)) : now;
  }

  for (const timeline of all(".timeline")) {
    const box = timeline.querySelector(".scroller");
    for (const button of all("[data-zoom]", timeline.querySelector(".zooms")))
      button.addEventListener("click", () => zoom(timeline, Number(button.dataset.zoom)));
    box.addEventListener("wheel", (event) => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      const outside = box.getBoundingClientRect();
      zoom(timeline, event.deltaY < 0 ? 1.25 : 0.8, (event.clientX - outside.left) / outside.width);
    }, { passive: false });
    box.addEventListener("pointermove", (event) => {
      const span = event.target.closest(".row .span");
      if (span) chooseSpan(timeline, span);
    });
    box.addEventListener("keydown", (event) => {
      const factor = { "+": 2, "-": 0.5 }[event.key];
      const next = factor ? null : nextSpan(timeline, event.key);
      if (!factor && !next) return;
      event.preventDefault();
      if (factor) zoom(timeline, factor); else chooseSpan(timeline, next, true);
    });
  }

  // Paper has no way to unfold anything.
  let unfolded = [];
  addEventListener("beforeprint", () => {
    unfolded = all("details:not([open])");
    for (const one of unfolded) one.open = true;
  });
  addEventListener("afterprint", () => {
    for (const one of unfolded) one.open = false;
  });
})();
