// Tokens in color: blue above, orange below; entropy in blue only. Values of a rollout without them are one token's.

const COLORS = {
  advantage: { of: (t) => t.advantage, middle: 0, floor: 1e-6, words: (m) => `orange ${number(-m)}, none 0, blue ${number(m)} and beyond` },
  ratio: {
    of: (t) => (t.logp === null || t.sampled === null ? null : t.logp - t.sampled), floor: 0.05,
    words: (m) => `orange ×${number(Math.exp(-m))}, none ×1, blue ×${number(Math.exp(m))} and beyond (probability now : when sampled)`,
  },
  teacher: {
    of: (t) => (t.logp === null || t.teacher === null ? null : t.teacher - t.logp), floor: 0.05,
    words: (m) => `orange ×${number(Math.exp(-m))}, none ×1, blue ×${number(Math.exp(m))} and beyond (probability to the teacher : to the policy)`,
  },
  entropy: { of: (t) => t.entropy, floor: 0.1, words: (m) => `none 0, blue ${number(m)} nats and beyond` },
};

const number = (value) => (typeof value === "number" ? String(Number.isInteger(value) ? value : Number(value.toPrecision(4))) : value === null || value === undefined ? "?" : String(value));
const written = (value) => (value === null || value === undefined ? "" : typeof value === "object" ? JSON.stringify(value) : String(value));
const numeric = (value) => (typeof value === "number" ? value : null);

function tokensOf(row) {
  const per = row.per_token;
  if (!per) return [{ text: row.response, advantage: numeric(row.advantage), logp: null, sampled: null, entropy: null, teacher: null }];
  const at = (list, i) => numeric(Array.isArray(list) ? list[i] : list);
  return per.text.map((text, i) => ({
    text, advantage: at(per.advantage, i), logp: at(per.logp, i), sampled: at(per.sampled_logp, i), entropy: at(per.entropy, i), teacher: at(per.teacher_logp, i),
  }));
}

// One scale for all the rollouts side by side, so that colors can be compared: the 95th percentile, which no single token
// of theirs can stretch; what is beyond it has the full color.
function scaleOf(rows, color) {
  if (color === "none") return null;
  const values = rows.flatMap((row) => tokensOf(row).map(COLORS[color].of)).filter((v) => v !== null);
  const sizes = Float64Array.from(values, Math.abs).sort();
  return sizes.length ? Math.max(COLORS[color].floor, sizes[Math.ceil(0.95 * sizes.length) - 1]) : null;
}

// Format characters, such as those that turn the direction of writing, would reorder the numbers next to them.
const quoted = (text) => JSON.stringify(text).replace(/\p{Cf}/gu, (c) => `\\u{${c.codePointAt(0).toString(16)}}`);

function describe(token, place, count) {
  const ratio = COLORS.ratio.of(token);
  const facts = [`token ${place + 1} of ${count} ${quoted(token.text)}`, `advantage ${number(token.advantage)}`];
  if (token.logp !== null) facts.push(`probability ${number(Math.exp(token.logp))}`, `ratio ${number(ratio === null ? null : Math.exp(ratio))}`);
  if (token.teacher !== null) facts.push(`to the teacher ${number(Math.exp(token.teacher))}`);
  if (token.entropy !== null) facts.push(`entropy ${number(token.entropy)} nats`);
  return facts.join("  ·  ");
}

// The response's own tokens, or its whole text, with what tools have said between them, which nobody is trained on.
function withTools(row, parts) {
  if (!row.turns) return parts;
  const own = row.turns.filter((turn) => turn.role !== "tool");
  const fits = own.reduce((sum, turn) => sum + turn.tokens, 0) === parts.length;
  const shown = [];
  for (const turn of row.turns) {
    if (turn.role !== "tool") shown.push(...(fits ? parts.splice(0, turn.tokens) : [turn.text]));
    else {
      const told = make("span", "told", turn.text);
      told.title = turn.tool.map((name, i) => `${name}: ${turn.outcome[i]}`).join(", ");
      if (turn.outcome.some((outcome) => outcome !== "ok")) told.classList.add("failed");
      shown.push(told);
    }
  }
  return shown;
}

function responseElement(row, color, scale) {
  const box = make("div", "text response");
  box.tabIndex = 0;
  box.setAttribute("role", "group");
  box.setAttribute("aria-label", "Response; left and right arrows move from token to token");
  if (color === "none" && !row.per_token) { box.append(...withTools(row, [row.response])); return box; }
  const tokens = tokensOf(row);
  const spans = tokens.map((token) => {
    const span = make("span", "tok", token.text);
    const value = color === "none" || scale === null ? null : COLORS[color].of(token);
    if (value !== null) {
      span.classList.add(value < 0 ? "lower" : "higher");
      span.style.setProperty("--part", String(Math.min(1, Math.abs(value) / scale)));
    }
    return span;
  });
  box.append(...withTools(row, [...spans]));
  let at = -1;
  const go = (to, byKey) => {
    if (to < 0 || to >= spans.length) return;
    if (at >= 0) spans[at].classList.remove("at");
    at = to;
    spans[at].classList.add("at");
    if (byKey) spans[at].scrollIntoView({ block: "nearest", inline: "nearest" });
    byId("token").textContent = describe(tokens[at], at, spans.length);
  };
  box.addEventListener("pointerover", (event) => go(spans.indexOf(event.target), false));
  box.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
    if (by) { event.preventDefault(); go(Math.max(0, at + by), true); }
  });
  return box;
}
