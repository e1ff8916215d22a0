// The chosen rollout, alone, with its group, or next to another step of its problem.

const WIDEST = 16; // rollouts side by side
const NO_VALUES = "Not logged for this rollout: only one that the logged optimizer step was trained on has values per token.";
let drawing = 0;

function fact(list, name, value, names) {
  if (value === "" || value === null || value === undefined) return;
  list.append(make("dt", "", name), make("dd", names || "fact", value));
}

function factsOf(row) {
  const list = make("dl", "facts");
  fact(list, "truncated", row.cut === null ? "" : row.cut ? "yes, at the length limit" : "no");
  fact(list, "reason", row.reason);
  fact(list, "answer read", written(row.extracted));
  fact(list, "reward", number(row.reward));
  for (const [name, value] of Object.entries(row.rewards || {})) fact(list, name.replaceAll("_", " "), number(value));
  for (const [name, [correct, reason]] of Object.entries(row.graders || {})) {
    fact(list, `${name} grader`, (correct ? "correct" : "incorrect") + (reason ? `: ${reason}` : ""));
  }
  if (new Set(Object.values(row.graders || {}).map(([correct]) => correct)).size > 1) {
    fact(list, "suspect", "the graders disagree", "warn");
  }
  if (row.advantage !== null) fact(list, "advantage", number(row.advantage));
  fact(list, "tokens", written(row.tokens));
  if (row.entropy !== null) fact(list, "mean entropy", `${number(row.entropy)} nats per token`);
  if (row.kept !== null) fact(list, "fine-tuned on", row.kept ? "yes" : "no");
  for (const [name, value] of Object.entries(row.more)) fact(list, name.replaceAll("_", " "), written(value));
  return list;
}

function cardOf(n, row, color, scale) {
  const card = make("article", n === chosen ? "card chosen" : "card");
  const step = row.step === null ? "" : `step ${row.step}, `;
  card.append(make("h2", "", `${step}rollout no. ${n}, ${index.sources[index.source[n]]}`));
  card.append(make("p", `verdict ${row.verdict}`, VERDICTS[row.verdict] + (row.cut ? ", truncated" : "")));
  card.append(responseElement(row, color, scale), factsOf(row));
  if (color !== "none" && tokensOf(row).every((token) => COLORS[color].of(token) === null)) {
    card.append(make("p", "muted", NO_VALUES));
  }
  return card;
}

function numbersToDraw(view) {
  if (view === "one") return [chosen];
  if (view === "group") {
    const group = groupOf(chosen), place = group.indexOf(chosen);
    const from = Math.max(0, Math.min(place - WIDEST / 2, group.length - WIDEST));
    return group.slice(from, from + WIDEST);
  }
  const value = byId("other").value;
  return value === "" ? [chosen] : [chosen, ...atStep(chosen, Number(value)).slice(0, WIDEST - 1)];
}

function offerSteps() {
  const select = byId("other"), before = select.value;
  const steps = stepsOf(chosen).filter((step) => step !== null && step !== index.step[chosen]);
  select.replaceChildren(...steps.map((step) => option(step, String(step))));
  if (!steps.length) select.append(option("", "no other step"));
  select.value = steps.map(String).includes(before) ? before : steps.length ? String(steps[steps.length - 1]) : "";
  byId("other-label").hidden = byId("view").value !== "steps";
}

async function drawDetail() {
  const mine = ++drawing, target = byId("detail");
  byId("token").textContent = "";
  if (chosen === null) { target.replaceChildren(make("p", "muted", "Nothing to show.")); byId("legend").textContent = ""; return; }
  offerSteps();
  const color = byId("color").value, numbers = numbersToDraw(byId("view").value);
  const rows = await Promise.all(numbers.map(rowOf));
  if (mine !== drawing) return;
  const scale = scaleOf(rows, color), first = await rowOf(chosen);
  if (mine !== drawing) return;
  byId("legend").textContent = color === "none" ? "" : scale === null ? "no such values here" : COLORS[color].words(scale);
  const cards = make("div", "cards");
  cards.append(...numbers.map((n, i) => cardOf(n, rows[i], color, scale)));
  const prompt = make("div", "text prompt", first.prompt);
  prompt.tabIndex = 0;
  const truth = make("dl", "facts");
  fact(truth, "reference answer", written(first.truth));
  const problem = `Problem no. ${index.problem[chosen]}` + (numbers.length > 1 ? `, ${numbers.length} rollouts` : "");
  target.replaceChildren(make("h2", "", problem), prompt, truth, cards);
  prompt.scrollTop = prompt.scrollHeight; // where the problem is
  cards.querySelector(".chosen").scrollIntoView({ block: "nearest", inline: "nearest" });
  target.scrollTop = 0;
  document.documentElement.dataset.drawn = String(chosen);
}
