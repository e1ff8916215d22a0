// Which rows are shown: `shown` holds their numbers, by step, then problem.

const CUT = 1, DISAGREE = 2, HAS_TOKENS = 4; // bits of `flags`, as page.py writes them
const VERDICTS = { correct: "correct", format_only: "well-formed, incorrect", neither: "not well-formed", unknown: "not judged" };
const SHOW = {
  all: ["everything", () => true],
  correct: ["correct", (n) => verdict(n) === "correct"],
  format_only: ["well-formed but incorrect", (n) => verdict(n) === "format_only"],
  neither: ["not well-formed", (n) => verdict(n) === "neither"],
  cut: ["truncated at the length limit", (n) => Boolean(index.flags[n] & CUT)],
  disagree: ["reward-hacking suspects: the graders disagree", (n) => Boolean(index.flags[n] & DISAGREE)],
  tokens: ["with values per token", (n) => Boolean(index.flags[n] & HAS_TOKENS)],
};

let index = null, order = [], shown = [], searching = 0;

const verdict = (n) => index.verdicts[index.verdict[n]];

function sorted() {
  const step = (n) => (index.step[n] === null ? -1 : index.step[n]);
  return Array.from(index.step.keys()).sort(
    (a, b) => index.source[a] - index.source[b] || step(a) - step(b) || index.problem[a] - index.problem[b] || a - b
  );
}

function chosenByIndex() {
  const source = byId("source").value, step = byId("step").value, problem = byId("problem").value;
  const passes = SHOW[byId("show").value][1];
  return order.filter((n) =>
    (source === "" || index.source[n] === Number(source)) && (step === "" || index.step[n] === Number(step)) &&
    (problem === "" || index.problem[n] === Number(problem)) && passes(n)
  );
}

// Words are looked for chunk by chunk, so that the page answers meanwhile; a newer search ends an older one.
async function filter(report) {
  const mine = ++searching, words = byId("search").value.toLowerCase(), candidates = chosenByIndex();
  if (words === "") { shown = candidates; report(candidates.length, true); return; }
  const place = new Map(candidates.map((n, at) => [n, at]));
  const wanted = new Set(candidates.map((n) => Math.floor(n / index.chunk)));
  const found = [];
  let last = performance.now(), done = 0;
  for (const number of wanted) {
    const rows = await (chunks.get(number) || decoded(`rows-${number}`));
    if (mine !== searching) return;
    rows.forEach((row, i) => {
      const n = number * index.chunk + i;
      if (place.has(n) && `${row.prompt}\n${row.response}\n${written(row.truth)}`.toLowerCase().includes(words)) found.push(n);
    });
    done += 1;
    if (performance.now() - last > 150) {
      last = performance.now();
      report(found.length, false, done / wanted.size);
      await new Promise((go) => setTimeout(go));
      if (mine !== searching) return;
    }
  }
  shown = found.sort((a, b) => place.get(a) - place.get(b));
  report(shown.length, true);
}

const sameProblem = (n) => order.filter((m) => index.source[m] === index.source[n] && index.problem[m] === index.problem[n]);

const stepsOf = (n) => [...new Set(sameProblem(n).map((m) => index.step[m]))];

const atStep = (n, step) => sameProblem(n).filter((m) => index.step[m] === step);

const groupOf = (n) => atStep(n, index.step[n]);
