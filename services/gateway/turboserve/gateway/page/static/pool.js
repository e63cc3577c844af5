// The operator's page: what the pool is, why, what is ordered of it, and what it costs.

import { rememberKey, rememberedKey } from "./memory.js";
import { inWords } from "./words.js";

const EVERY_MS = 1000;
const at = (id) => document.getElementById(id);

let key = rememberedKey();
let scaling = null;

async function call(method, path, body) {
  const headers = key ? { Authorization: `Bearer ${key}` } : {};
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let answer;
  try {
    answer = await fetch(path, { method, headers, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch {
    throw { code: "unreachable" };
  }
  const found = await answer.json().catch(() => ({}));
  if (!answer.ok) throw { status: answer.status, ...found };
  return found;
}

function complain(problem) {
  at("message").hidden = !problem;
  if (!problem) return;
  at("message").textContent = inWords(problem);
  if (problem.code !== "unauthorized") return;
  // Asked again every second, a wrong key would soon be one too many.
  key = "";
  rememberKey(key);
  at("key-row").hidden = false;
}

function fill(list, items, make) {
  list.replaceChildren(...items.map(make));
}

function element(name, text, more = {}) {
  const made = document.createElement(name);
  made.textContent = text;
  Object.assign(made, more);
  return made;
}

const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString([], { hour12: false });
const number = (value, digits) => (value === null || value === undefined ? "–" : value.toFixed(digits));

function showMember(member) {
  const box = element("div", "", { className: "member" });
  box.dataset.phase = member.phase;
  box.setAttribute("role", "listitem");
  const title = element("b", "");
  title.append(element("span", member.member), element("span", member.phase.replace("_", " ")));
  const suspended = member.suspended ? `, ${member.suspended} suspended` : "";
  const holds = member.worker ? `${member.sessions} sessions${suspended}` : "";
  box.append(title, element("p", [holds, member.reason].filter(Boolean).join(" · ")));
  return box;
}

function showLine(when, what, more) {
  const line = element("li", "");
  line.append(element("time", clock(when)), element("span", what), element("span", more, { className: "more" }));
  return line;
}

function showPool(pool) {
  scaling = pool.scaling;
  at("summary").textContent = pool.summary;
  const busy = pool.starting || pool.draining || pool.reason;
  document.body.dataset.mode = busy ? "waiting" : "live";
  const more = ["starting", "draining"].filter((name) => pool[name]).map((name) => `${pool[name]} ${name}`);
  at("phase").textContent = [`${pool.ready} ready`, ...more].join(", ");
  fill(at("members"), pool.members, showMember);
  fill(at("actions"), pool.actions.toReversed(), (a) =>
    showLine(a.at, [a.action, a.member].filter(Boolean).join(" "), a.reason));
  at("r-startup").textContent = pool.start_up_s === null ? "–" : `${number(pool.start_up_s, 1)} s`;
  for (const name of ["workers", "dry-run", "release"]) at(name).disabled = !scaling;
  if (!scaling) return;
  at("r-target").textContent = scaling.advice === scaling.target ? scaling.target : `${scaling.target} (${scaling.advice})`;
  at("r-limits").textContent = `${scaling.least}–${scaling.most}`;
  at("r-required").textContent = scaling.required ?? "–";
  at("r-rho").textContent = number(scaling.rho_max, 2);
  at("r-volatility").textContent = number(scaling.volatility, 2);
  at("r-level").textContent = scaling.level;
  at("r-target-rho").textContent = scaling.target_utilization;
  at("r-weight").textContent = scaling.latency_weight;
  at("workers").min = scaling.least;
  at("workers").max = scaling.most;
  if (document.activeElement !== at("workers")) at("workers").value = scaling.override ?? scaling.target;
  at("dry-run").checked = scaling.mode === "dry_run";
  at("table-of").textContent = `Parameters from: ${scaling.table?.source ?? "–"}`;
  fill(at("decisions"), scaling.decisions.toReversed(), (d) =>
    showLine(d.at, d.target === d.previous ? `${d.action} at ${d.target}` : `${d.action}: ${d.previous} → ${d.target}`, d.reason));
}

function showCost(cost) {
  const money = new Intl.NumberFormat([], { style: "currency", currency: cost.currency, maximumFractionDigits: 4 });
  const amount = (one) => (one.money > 0 ? money.format(one.money) : `${one.gpu_seconds.toFixed(0)} GPU s`);
  at("c-total").textContent = amount(cost.total);
  at("c-used").textContent = amount(cost.used);
  at("c-idle").textContent = amount(cost.idle);
  fill(at("kinds"), cost.kinds, (kind) => {
    const line = element("li", "");
    const starting = `${kind.starting_gpu_seconds.toFixed(0)} starting`;
    line.append(
      element("span", `${kind.kind} at ${money.format(kind.price_per_gpu_hour)}/h`),
      element("span", `${kind.gpu_seconds.toFixed(0)} GPU s, ${starting}, ${kind.running} of ${kind.workers} running`),
    );
    return line;
  });
}

async function order(path, body) {
  try {
    await call("PUT", `v1/pool/${path}`, body);
    complain(null);
    showPool(await call("GET", "v1/pool"));
  } catch (problem) {
    complain(problem);
  }
}

async function look() {
  try {
    showPool(await call("GET", "v1/pool"));
    showCost(await call("GET", "v1/cost?limit=1"));
    complain(null);
  } catch (problem) {
    at("phase").textContent = "no report";
    document.body.dataset.mode = "empty";
    complain(problem);
  }
  setTimeout(look, EVERY_MS);
}

at("override-form").addEventListener("submit", (event) => {
  event.preventDefault();
  if (at("workers").value !== "") order("override", { workers: Number(at("workers").value) });
});
at("release").addEventListener("click", () => order("override", { workers: null }));
at("dry-run").addEventListener("change", () => order("dry-run", { dry_run: at("dry-run").checked }));
at("key").addEventListener("change", () => {
  key = at("key").value;
  rememberKey(key);
});

look();
