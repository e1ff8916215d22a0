// The list, which holds only the rows in view, the keys, and the address that leads back to what is seen.

const ROW = 28; // pixels, as in page.css
const STATE = ["source", "step", "show", "problem", "search", "view", "other", "color"];
const previews = new Map(); // of rows that have been in view
let chosen = null, remembering = 0;

function option(value, text) {
  const element = make("option", "", text);
  element.value = String(value);
  return element;
}

function rowElement(n, place) {
  const row = make("div", "row");
  row.id = `row-${n}`;
  row.setAttribute("role", "option");
  row.setAttribute("aria-selected", String(n === chosen));
  row.setAttribute("aria-setsize", String(shown.length));
  row.setAttribute("aria-posinset", String(place + 1));
  row.style.top = `${place * ROW}px`;
  const flags = index.flags[n], marks = (flags & CUT ? ", truncated" : "") + (flags & DISAGREE ? " ⚠" : "");
  row.append(
    make("span", "", written(index.step[n])), make("span", "", String(index.problem[n])),
    make("span", "", index.reward[n] === null ? "?" : number(index.reward[n])),
    make("span", verdict(n), VERDICTS[verdict(n)] + marks), make("span", "", written(index.tokens[n])), make("span", "", "")
  );
  row.addEventListener("click", () => choose(place));
  preview(n).then((text) => { row.lastChild.textContent = text; });
  return row;
}

async function preview(n) {
  if (!previews.has(n)) {
    if (previews.size > 5000) previews.clear();
    previews.set(n, (await rowOf(n)).response.slice(0, 200).replace(/\s+/g, " "));
  }
  return previews.get(n);
}

function drawList() {
  const list = byId("list"), first = Math.max(0, Math.floor(list.scrollTop / ROW) - 5);
  const last = Math.min(shown.length, first + Math.ceil(list.clientHeight / ROW) + 10);
  byId("spacer").style.height = `${shown.length * ROW}px`;
  const rows = [];
  for (let place = first; place < last; place++) rows.push(rowElement(shown[place], place));
  list.replaceChildren(byId("spacer"), ...rows);
  if (chosen === null) list.removeAttribute("aria-activedescendant");
  else list.setAttribute("aria-activedescendant", `row-${chosen}`);
}

function choose(place) {
  chosen = shown.length ? shown[Math.max(0, Math.min(place, shown.length - 1))] : null;
  const list = byId("list"), top = shown.indexOf(chosen) * ROW;
  if (top < list.scrollTop) list.scrollTop = top;
  if (top + ROW > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW - list.clientHeight;
  drawList();
  return drawDetail().then(remember);
}

// Browsers throw where the address changes more often than some 100 times in half a minute, as a held key would do it.
function remember() {
  const state = new URLSearchParams();
  for (const name of STATE) if (byId(name).value !== byId(name).dataset.first) state.set(name, byId(name).value);
  if (chosen !== null) state.set("row", String(chosen));
  clearTimeout(remembering);
  remembering = setTimeout(() => history.replaceState(null, "", `#${state}`), 200);
}

async function refilter(wanted) {
  await filter((found, isDone, part) => {
    const words = `${found.toLocaleString("en")} of ${order.length.toLocaleString("en")} rollouts`;
    byId("count").textContent = isDone ? words : `${words}, searched ${Math.round(100 * part)} %`;
    if (!isDone) return;
    byId("list").scrollTop = 0;
    document.documentElement.dataset.filtered = String(found);
    choose(Math.max(0, shown.indexOf(wanted)));
  });
}

function onKey(event) {
  const typing = /^(INPUT|SELECT|TEXTAREA)$/.test(event.target.tagName);
  if (typing && event.key === "Escape") { byId("list").focus(); return; }
  if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
  const inList = event.target === byId("list"), page = Math.floor(byId("list").clientHeight / ROW) - 1;
  const moves = { j: 1, k: -1, ...(inList && { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -Infinity, End: Infinity }) };
  if (event.key in moves) choose(Math.max(0, shown.indexOf(chosen)) + moves[event.key]);
  else if (event.key === "/") byId("search").focus();
  else if (event.key === "v" || event.key === "c") {
    const select = byId(event.key === "v" ? "view" : "color");
    select.selectedIndex = (select.selectedIndex + 1) % select.length;
    drawDetail().then(remember);
  } else return;
  event.preventDefault();
}

function fillFilters() {
  byId("source").append(option("", "everything"), ...index.sources.map((name, i) => option(i, name)));
  const steps = [...new Set(index.step)].filter((step) => step !== null).sort((a, b) => a - b);
  byId("step").append(option("", "all"), ...steps.map((step) => option(step, String(step))));
  byId("show").append(...Object.entries(SHOW).map(([name, [words]]) => option(name, words)));
  const state = new URLSearchParams(location.hash.slice(1));
  for (const name of STATE) {
    byId(name).dataset.first = byId(name).value;
    if (state.has(name)) byId(name).value = state.get(name);
    if (byId(name).tagName === "SELECT" && byId(name).selectedIndex < 0 && name !== "other") byId(name).selectedIndex = 0;
  }
  return state;
}

async function start() {
  index = await decoded("index");
  byId("title").textContent = document.title = `Rollouts: ${index.title}`;
  order = sorted();
  const state = fillFilters();
  for (const name of ["source", "step", "show", "problem"]) byId(name).addEventListener("change", () => refilter(chosen));
  byId("search").addEventListener("input", () => refilter(chosen));
  for (const name of ["view", "other", "color"]) byId(name).addEventListener("change", () => drawDetail().then(remember));
  byId("list").addEventListener("scroll", () => requestAnimationFrame(drawList));
  addEventListener("resize", drawList);
  addEventListener("keydown", onKey);
  await refilter(state.has("row") ? Number(state.get("row")) : null);
  if (state.has("other")) byId("other").value = state.get("other");
  await drawDetail();
  remember();
  byId("list").focus();
  document.documentElement.dataset.openedMs = String(Math.round(performance.now()));
}

start().catch((error) => { byId("title").textContent = `This page could not be shown: ${error}. It needs a browser of 2023 or later.`; });
