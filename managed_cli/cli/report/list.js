// The list of rows: searched, ordered, and drawn only as far as it is seen.

const list = byId("list"), space = byId("space"), windowed = byId("window");

function drawList() {
  const first = Math.max(0, Math.floor(list.scrollTop / ENTRY_HEIGHT) - 4);
  const last = Math.min(shown.length, first + Math.ceil(list.clientHeight / ENTRY_HEIGHT) + 8);
  space.style.height = `${Math.max(1, shown.length * ENTRY_HEIGHT)}px`;
  windowed.style.transform = `translateY(${first * ENTRY_HEIGHT}px)`;
  windowed.replaceChildren();
  for (let at = first; at < last; at++) {
    const place = shown[at];
    const node = isTree(samples.get(rows.id[place])) ? `, node ${visible(rows.node[place])}` : "";
    const title = element("div", {}, element("b", {}, visible(rows.id[place])), ` choice ${rows.choice[place]}${node}`);
    const mean = rows.mean[place] === null ? "no mean" : rows.mean[place].toFixed(3);
    const what = `${rows.length[place]} tokens, ${visible(rows.reasons[rows.finish[place]])}, logprob ${mean} · `;
    const line = element("div", { class: "what" }, what + visible(rows.excerpt[place].replaceAll("\n", " ")));
    const option = element("div", {
      id: `row${place}`, class: "entry", role: "option", "aria-selected": String(place === chosen),
      "aria-setsize": shown.length, "aria-posinset": at + 1, "data-place": place,
    }, title, line);
    windowed.append(option);
  }
  if (byId(`row${chosen}`)) list.setAttribute("aria-activedescendant", `row${chosen}`);
  else list.removeAttribute("aria-activedescendant");
}

let filtering = 0;
async function filterList() {
  const mine = ++filtering, wanted = byId("search").value.toLowerCase(), reason = byId("reason").value;
  const order = byId("order").value, found = [];
  for (let block = 0; block * ROWS_PER_BLOCK < rows.id.length; block++) {
    const begin = block * ROWS_PER_BLOCK, end = Math.min(rows.id.length, begin + ROWS_PER_BLOCK);
    const entries = wanted ? await blockEntries(block) : null;
    if (mine !== filtering) return;
    if (wanted && block % 16 === 0) byId("found").textContent = `searching … ${begin} of ${rows.id.length}`;
    for (let place = begin; place < end; place++) {
      if (reason !== "" && rows.finish[place] !== Number(reason)) continue;
      if (wanted) {
        const entry = entries[place - begin];
        entry.lower ??= entry.text.toLowerCase();
        if (!entry.lower.includes(wanted) && !rows.id[place].toLowerCase().includes(wanted)) continue;
      }
      found.push(place);
    }
  }
  const key = order.replace("-", ""), sign = order.startsWith("-") ? -1 : 1;
  if (key) found.sort((a, b) => ((rows[key][a] ?? Infinity) - (rows[key][b] ?? Infinity)) * sign || a - b);
  shown = found;
  byId("found").textContent = `${found.length.toLocaleString("en")} of ${rows.id.length.toLocaleString("en")} rows`;
  list.scrollTop = 0;
  drawList();
}

function choose(place, scroll = true) {
  chosen = place;
  const at = shown.indexOf(place), top = at * ENTRY_HEIGHT;
  if (scroll && at >= 0) {
    if (top < list.scrollTop) list.scrollTop = top;
    else if (top + ENTRY_HEIGHT > list.scrollTop + list.clientHeight)
      list.scrollTop = top + ENTRY_HEIGHT - list.clientHeight;
  }
  drawList();
  if (location.hash !== `#row=${rows.number[place]}`) location.hash = `row=${rows.number[place]}`;
  return showRow(place);
}

list.addEventListener("scroll", drawList, { passive: true });
list.addEventListener("click", (event) => {
  const option = event.target.closest("[data-place]");
  if (option) choose(Number(option.dataset.place));
});
list.addEventListener("keydown", (event) => {
  const page = Math.max(1, Math.floor(list.clientHeight / ENTRY_HEIGHT) - 1), at = shown.indexOf(chosen);
  const steps = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + page, PageUp: at - page, Home: 0, End: shown.length };
  if (!(event.key in steps) || !shown.length) return;
  event.preventDefault();
  choose(shown[Math.min(shown.length - 1, Math.max(0, steps[event.key]))]);
});

// The theme, and the start.

const themes = ["system", "light", "dark"];
function setTheme(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  byId("theme").textContent = `Theme: ${theme}`;
}
byId("theme").addEventListener("click", () => {
  const now = document.documentElement.dataset.theme ?? "system";
  setTheme(themes[(themes.indexOf(now) + 1) % themes.length]);
});

function chooseFromAddress() {
  const wanted = /^#row=(\d+)$/.exec(location.hash);
  const place = wanted ? rows.number.indexOf(Number(wanted[1])) : -1;
  if (place >= 0 && place !== chosen) return choose(place);
}

async function start() {
  rows = asJson(await unpacked(byId("rows")));
  samples = new Map();
  rows.id.forEach((id, place) => {
    if (samples.has(id)) samples.get(id).push(place);
    else samples.set(id, [place]);
  });
  rows.reasons.forEach((reason, place) => byId("reason").append(element("option", { value: place }, visible(reason))));
  let waiting = 0;
  byId("search").addEventListener("input", () => {
    clearTimeout(waiting);
    waiting = setTimeout(filterList, 150); // a word is typed in less than its letters
  });
  for (const id of ["reason", "order"]) byId(id).addEventListener("change", filterList);
  addEventListener("hashchange", chooseFromAddress);
  addEventListener("resize", drawList);
  await filterList();
  await chooseFromAddress();
  if (chosen < 0 && shown.length) await choose(shown[0]);
  document.documentElement.dataset.ready = "yes";
}

start();
