"use strict";
// The rows lie in the page as zlib in base64 (see encoding.py) and are unpacked when they are looked at.
// Text of a model only ever enters the page as text: `append` and `textContent`, never as markup.

const ENTRY_HEIGHT = 64; // pixels; as .entry in the style
const TOKENS_AT_ONCE = 4000; // what a browser lays out without a pause
const LOGPROB_STEPS = 1000, INFINITE_STEP = 65534, MISSING_STEP = 65535; // as in encoding.py
const PROBABILITY_FLOORS = [0.9, 0.5, 0.1, 0.01, 0];
const PROBABILITY_NAMES = ["90% and more", "50% to 90%", "10% to 50%", "1% to 10%", "below 1%"];
// Control, format, surrogate and separator characters, but for the two joiners that words and emoji need.
const HARMFUL = /(?![\u200c\u200d])[\p{Cc}\p{Cf}\p{Cs}\p{Zl}\p{Zp}]/gu;

const byId = (id) => document.getElementById(id);
const detail = byId("detail");
let rows; // the columns of the list, by name
let samples; // sample id → places of its rows in the list
let shown = []; // places of the rows that the search has left, in their order
let chosen = -1; // the place of the row on show
const textBlocks = document.querySelectorAll("script.block");
const arrayBlocks = document.querySelectorAll("script.arrays");
const ROWS_PER_BLOCK = Number(byId("rows").dataset.rowsPerBlock);

function element(name, attributes = {}, ...children) {
  const made = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function escapeOf(character) {
  const code = character.codePointAt(0);
  if (code === 9) return "\\t";
  if (code < 256) return "\\x" + code.toString(16).padStart(2, "0");
  return code < 65536 ? "\\u" + code.toString(16).padStart(4, "0") : "\\U" + code.toString(16).padStart(8, "0");
}

const visible = (text) => text.replace(HARMFUL, escapeOf);

// Appends `text` to `parent`; what would hide or reorder it stands as an escape, a line break as ↵ and a break.
function appendVisible(parent, text) {
  let from = 0;
  for (const found of text.matchAll(HARMFUL)) {
    parent.append(text.slice(from, found.index));
    from = found.index + found[0].length;
    const mark = found[0] === "\n" ? "↵" : escapeOf(found[0]);
    parent.append(element("span", { class: "esc" }, mark));
    if (found[0] === "\n") parent.append("\n");
  }
  parent.append(text.slice(from));
}

async function unpacked(script) {
  const binary = atob(script.textContent);
  const bytes = Uint8Array.from(binary, (character) => character.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Uint8Array(await new Response(stream).arrayBuffer());
}

const asJson = (bytes) => JSON.parse(new TextDecoder().decode(bytes));

const entriesOfBlock = new Map();
function blockEntries(block) {
  if (!entriesOfBlock.has(block)) entriesOfBlock.set(block, unpacked(textBlocks[block]).then(asJson));
  return entriesOfBlock.get(block);
}

function fromPlanes(bytes, at, count, planes) {
  const values = new Uint32Array(count);
  for (let plane = planes - 1; plane >= 0; plane--)
    for (let i = 0; i < count; i++) values[i] = values[i] * 256 + bytes[at + plane * count + i];
  return values;
}

// The row at `place` of the list: its text, turns and metadata, and its arrays.
async function rowAt(place) {
  const block = Math.floor(place / ROWS_PER_BLOCK), inside = place % ROWS_PER_BLOCK;
  const [entries, bytes] = await Promise.all([blockEntries(block), unpacked(arrayBlocks[block])]);
  const total = entries.reduce((sum, entry) => sum + entry.tokens, 0);
  const before = entries.slice(0, inside).reduce((sum, entry) => sum + entry.tokens, 0);
  const entry = entries[inside], until = before + entry.tokens;
  const mask = bytes.subarray(6 * total, 7 * total);
  const sampled = mask.reduce((sum, flag) => sum + flag, 0);
  let next = mask.subarray(0, before).reduce((sum, flag) => sum + flag, 0);
  const codes = fromPlanes(bytes, 7 * total, sampled, 2);
  const ids = fromPlanes(bytes, 0, total, 3).subarray(before, until);
  const lengths = fromPlanes(bytes, 3 * total, total, 3).subarray(before, until);
  const tokens = [];
  for (let i = 0, at = 0; i < entry.tokens; i++) {
    const token = { position: i, id: ids[i], sampled: mask[before + i] === 1, text: null, code: MISSING_STEP };
    if (token.sampled) token.code = codes[next++];
    if (entry.spelt) token.text = entry.text.slice(at, (at += lengths[i]));
    tokens.push(token);
  }
  return { ...entry, list: tokens };
}

function logprobOf(token) {
  if (token.code === MISSING_STEP) return NaN;
  return token.code === INFINITE_STEP ? -Infinity : -token.code / LOGPROB_STEPS;
}

function classOf(token) {
  const probability = Math.exp(logprobOf(token));
  const place = PROBABILITY_FLOORS.findIndex((floor) => probability >= floor);
  return token.sampled ? ` p${place < 0 ? 4 : place}` : "";
}

function inWords(token, count) {
  const text = token.text === null ? "" : token.text === "" ? ", part of the next" : `, “${visible(token.text)}”`;
  let how = ", masked: it was sent, not sampled";
  if (token.sampled) {
    const logprob = logprobOf(token);
    const digits = Number.isNaN(logprob) ? "none" : Number.isFinite(logprob) ? logprob.toFixed(3) : "-inf";
    how = `, sampled, logprob ${digits}, probability ${(Math.exp(logprob) * 100).toFixed(1)}%`;
  }
  return `token ${token.position} of ${count}${text}, id ${token.id}${how}`;
}
