// The chosen row: its sample, its turns, and each of its tokens.

async function showRow(place) {
  const row = await rowAt(place);
  if (place !== chosen) return;
  const ofSample = samples.get(rows.id[place]);
  const children = [head(place)];
  children.push(isTree(ofSample) ? tree(ofSample, place) : choices(ofSample, place));
  children.push(element("p", { class: "numbers" }, numbersOf(place)), legend());
  children.push(element("output", { id: "token", "aria-live": "polite" }, "Point at a token, or move with the arrow keys."));
  children.push(...parts(row), facts(row));
  detail.replaceChildren(...children);
}

function head(place) {
  const line = element("div", { class: "head" });
  line.append(element("h3", {}, `${visible(rows.id[place])}, choice ${rows.choice[place]}`));
  const buttons = element("div", {});
  for (const [name, step] of [["Previous", -1], ["Next", 1]]) {
    const button = element("button", { type: "button" }, name), next = shown[shown.indexOf(place) + step];
    button.disabled = next === undefined || !shown.includes(place);
    button.addEventListener("click", () => choose(next));
    buttons.append(button, " ");
  }
  line.append(buttons);
  return line;
}

function numbersOf(place) {
  const mean = rows.mean[place] === null ? "none" : rows.mean[place].toFixed(4);
  const reason = visible(rows.reasons[rows.finish[place]]);
  return `row ${rows.number[place]}, node ${visible(rows.node[place])}: ${rows.prompt[place]} masked + ` +
    `${rows.length[place]} sampled tokens, ${reason}, mean logprob ${mean}`;
}

function rowButton(place, current, name) {
  const button = element("button", { type: "button" }, name);
  if (place === current) button.setAttribute("aria-current", "true");
  button.addEventListener("click", () => choose(place));
  return button;
}

function choices(places, current) {
  const line = element("div", { class: "choices", role: "group", "aria-label": "Rows of this sample" });
  if (places.length > 1)
    for (const place of places)
      line.append(rowButton(place, current, `choice ${rows.choice[place]}: ${rows.length[place]} tokens`));
  return line;
}

function isTree(places) {
  const nodes = new Set(places.map((place) => rows.node[place]));
  return places.some((place) => nodes.has(rows.parent[place]));
}

function tree(places, current) {
  const children = new Map(), byNode = new Map(places.map((place) => [rows.node[place], place]));
  const roots = places.filter((place) => !byNode.has(rows.parent[place]));
  for (const place of places) {
    const parent = byNode.get(rows.parent[place]);
    if (parent !== undefined) children.set(parent, [...(children.get(parent) ?? []), place]);
  }
  const branch = (these) => {
    const items = element("ul", {});
    for (const place of these) {
      const name = `node ${visible(rows.node[place])}: ${rows.length[place]} sampled, ${visible(rows.reasons[rows.finish[place]])}`;
      const item = element("li", {}, rowButton(place, current, name));
      if (children.has(place)) item.append(branch(children.get(place)));
      items.append(item);
    }
    return items;
  };
  const whole = branch(roots);
  whole.className = "tree";
  return element("nav", { "aria-label": "Tree of this sample: what each row goes on from" }, whole);
}

function legend() {
  const line = element("div", { class: "legend" }, "probability of a sampled token:");
  PROBABILITY_NAMES.forEach((name, place) => line.append(element("span", { class: `p${place}` }, name)));
  return line;
}

// The conversation: what was sent and what was sampled, one after the other.
function parts(row) {
  const found = [];
  for (let begin = 0; begin < row.list.length; ) {
    const sampled = row.list[begin].sampled, edge = row.turns.find((turn) => turn[0] === begin);
    let end = begin;
    while (end < row.list.length && row.list[end].sampled === sampled && !(edge && end === edge[1])) end++;
    found.push(part(row, begin, end, found));
    begin = end;
  }
  return found.length ? found : [element("p", { class: "hint" }, "This row has no tokens.")];
}

function part(row, begin, end, earlier) {
  const tokens = row.list.slice(begin, end), sampled = tokens[0].sampled;
  const number = row.turns.findIndex((turn) => turn[0] === begin);
  const count = `${tokens.length} ${tokens.length === 1 ? "token" : "tokens"}`;
  let title = `sent, masked: ${count}`;
  if (sampled) {
    const known = tokens.map(logprobOf).filter(Number.isFinite);
    const mean = known.length ? known.reduce((sum, value) => sum + value, 0) / known.length : NaN;
    const reason = number >= 0 ? `, ${visible(String(row.turns[number][2]))}` : "";
    title = `sampled${number >= 0 ? `, turn ${number + 1}` : ""}: ${count}${reason}, mean logprob ${mean.toFixed(3)}`;
  }
  const box = element("section", { class: `part ${sampled ? "sampled" : "masked"}` }, element("h4", {}, title));
  if (!row.spelt && row.spans) {
    const turn = earlier.filter((one) => one.classList.contains("sampled")).length;
    const text = element("p", { class: "text", dir: "auto" });
    const from = sampled ? row.spans[turn]?.[0] : (row.spans[turn - 1]?.[1] ?? 0);
    const to = sampled ? row.spans[turn]?.[1] : row.spans[turn]?.[0];
    appendVisible(text, from === undefined ? "" : row.text.slice(from, to));
    box.append(text);
  }
  const name = `${title}. Token by token: the left and right arrow keys move through them.`;
  const text = element("div", { class: `text${row.spelt ? "" : " ids"}`, dir: "auto", tabindex: "0", role: "group", "aria-label": name });
  box.append(text);
  appendTokens(text, tokens, 0, row);
  return box;
}

function appendTokens(text, tokens, from, row) {
  const until = Math.min(tokens.length, from + TOKENS_AT_ONCE);
  for (const token of tokens.slice(from, until)) {
    const span = element("span", { class: `t${classOf(token)}` });
    appendVisible(span, row.spelt ? token.text : String(token.id));
    span.token = token;
    text.append(span);
  }
  text.count = row.list.length;
  if (until === tokens.length) return;
  const more = element("button", { type: "button" }, `show more (${tokens.length - until} tokens are left)`);
  more.addEventListener("click", () => {
    more.remove();
    appendTokens(text, tokens, until, row);
    text.focus();
  });
  text.after(more);
}

function facts(row) {
  const box = element("details", {}, element("summary", {}, "Metadata of the row"));
  const text = element("pre", { class: "json", tabindex: "0" });
  text.textContent = visible(JSON.stringify(row.metadata, null, 1)).replaceAll("\\x0a", "\n");
  box.append(text);
  if (!row.spelt) {
    const why = "The run's tokenizer was not at hand when this page was written: tokens are shown by their ids.";
    const whole = element("pre", { class: "json", tabindex: "0" });
    appendVisible(whole, row.text);
    return element("div", {}, element("p", { class: "hint" }, why),
      element("details", {}, element("summary", {}, "The whole text"), whole), box);
  }
  return box;
}

function mark(span) {
  for (const other of detail.querySelectorAll(".t.current")) other.classList.remove("current");
  span.classList.add("current");
  byId("token").textContent = inWords(span.token, span.parentElement.count);
}

detail.addEventListener("pointerover", (event) => {
  const span = event.target.closest(".t");
  if (span) mark(span);
});
detail.addEventListener("click", (event) => {
  const span = event.target.closest(".t");
  if (span) mark(span);
});
detail.addEventListener("keydown", (event) => {
  const text = event.target.closest(".text[tabindex]");
  if (!text || !["ArrowRight", "ArrowLeft", "Home", "End"].includes(event.key)) return;
  event.preventDefault();
  const current = text.querySelector(".t.current");
  let next = event.key === "End" ? text.lastElementChild : text.firstElementChild;
  if (current && event.key === "ArrowRight") next = current.nextElementSibling ?? current;
  if (current && event.key === "ArrowLeft") next = current.previousElementSibling ?? current;
  if (!next) return;
  mark(next);
  next.scrollIntoView({ block: "nearest" });
});
