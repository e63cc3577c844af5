// The state of one pool now, its reasons, and what it had and needed over time.

import { duration, element, keyed, number, setText, setTime } from "./elements.js";
import { Plot, pointsOf } from "./plot.js";
import { counted } from "../words.js";

const at = (id) => document.getElementById(id);
const READOUTS = ["target", "limits", "required", "rho", "volatility", "basis", "target-rho", "weight"];
/** Fields and buttons that order the pool. */
const ORDERS = ["workers", "set-override", "release", "dry-run"];

const demand = new Plot(at("plot-demand"), {
  title: "Demand and capacity, sessions",
  unit: "sessions",
  series: [
    { key: "required", label: "required" },
    { key: "capacity", label: "capacity" },
    { key: "waiting", label: "waiting" },
  ],
});
const workers = new Plot(at("plot-workers"), {
  title: "Workers",
  series: [
    { key: "ready", label: "ready" },
    { key: "target", label: "target" },
    { key: "starting", label: "starting" },
    { key: "draining", label: "draining" },
  ],
});

export const overview = {
  everyMs: 10_000,
  load: (read) => read("history"),
  show(answer, range) {
    const points = pointsOf(answer);
    demand.draw(points, range, answer.step_s);
    workers.draw(points, range, answer.step_s);
  },
};

function playout(found) {
  const tiers = ["urgent", "normal", "relaxed"].filter((tier) => found[tier]).map((tier) => `${found[tier]} ${tier}`);
  const quality = found.quality === null ? "" : `, quality ${(found.quality * 100).toFixed(1)} %`;
  const lowered = found.lowered ? `, ${found.lowered} lowered` : "";
  const least = `least slack ${found.slack_s.toFixed(2)} s, credit ${found.credit_s.toFixed(2)} s`;
  return `${tiers.join(", ")}: ${least}${lowered}${quality}`;
}

function loan({ role, peer }) {
  return role === "donor" ? `lends its device to ${peer}` : `borrows the device of ${peer}`;
}

function makeMember() {
  const box = element("div", "", { className: "member" });
  box.setAttribute("role", "listitem");
  const title = element("b", "");
  title.append(element("span"), element("span"));
  box.append(title, element("p"), element("p"));
  return box;
}

/** Update a worker's box. `shows`: its models are shown. */
function updateMember(box, member, shows) {
  box.dataset.phase = member.phase;
  const [name, phase] = box.firstElementChild.children;
  setText(name, member.member);
  setText(phase, member.phase.replace("_", " "));
  const suspended = member.suspended ? `, ${member.suspended} suspended` : "";
  const holds = member.worker ? `${counted(member.sessions, "session")}${suspended}` : "";
  const models = shows ? (member.models ?? []).join(", ") : "";
  setText(box.children[1], [models, holds, member.reason].filter(Boolean).join(" · "));
  const runs = member.playout && member.playout.slack_s !== null;
  const shown = [runs ? playout(member.playout) : "", member.playout?.loan ? loan(member.playout.loan) : ""];
  setText(box.children[2], shown.filter(Boolean).join(" · "));
}

function line(what, more) {
  const made = element("li");
  made.append(element("time"), element("span", what), element("span", more, { className: "more" }));
  return made;
}

const timed = (row, one) => setTime(row.firstElementChild, one.at);

/** Show that there is no report. Nothing of another pool stays. */
export function showNoReport(summary) {
  setText(at("summary"), summary);
  for (const list of ["members", "actions"]) at(list).replaceChildren();
  setText(at("r-startup"), "–");
  showUnmanaged("–");
  for (const name of ORDERS) at(name).disabled = true;
}

/**
 * Show what a pool reports now. `edited`: whether the number of workers was typed and not sent yet. `isPast`: the
 * plots beside it show another time.
 */
export function showPool(pool, { edited, isPast }) {
  const scaling = pool.scaling;
  setText(at("summary"), isPast ? `Now: ${pool.summary}` : pool.summary);
  const models = new Set(pool.members.flatMap((member) => member.models ?? []));
  keyed(at("members"), pool.members, (member) => member.member, makeMember,
    (box, member) => updateMember(box, member, models.size > 1));
  keyed(at("actions"), pool.actions.toReversed(), (one) => `${one.at} ${one.action} ${one.member}`, (one) =>
    line([one.action, one.member].filter(Boolean).join(" "), one.reason ?? ""), timed);
  setText(at("r-startup"), pool.start_up_s === null ? "–" : `${number(pool.start_up_s, 1)} s`);
  for (const name of ORDERS) at(name).disabled = !scaling;
  if (!scaling) return showUnmanaged("Another system starts the workers of this pool.");
  const advised = scaling.advice === scaling.target ? scaling.target : `${scaling.target} (${scaling.advice})`;
  setText(at("r-target"), String(advised));
  setText(at("r-limits"), `${scaling.least}–${scaling.most}`);
  setText(at("r-required"), String(scaling.required ?? "–"));
  setText(at("r-rho"), number(scaling.rho_max, 2));
  setText(at("r-volatility"), number(scaling.volatility, 2));
  setText(at("r-basis"), scaling.level === null ? `Learned, ${duration(scaling.learned_from_s)}` : `Profile, level ${scaling.level}`);
  setText(at("r-target-rho"), String(scaling.target_utilization));
  setText(at("r-weight"), String(scaling.latency_weight));
  at("workers").min = scaling.least;
  at("workers").max = scaling.most;
  if (!edited) at("workers").value = scaling.override ?? scaling.target;
  at("dry-run").checked = scaling.mode === "dry_run";
  setText(at("table-of"), scaling.level === null
    ? "Headroom: learned from this pool's own demand."
    : `Profile: ${scaling.profile?.source ?? "–"}`);
  keyed(at("newest-decisions"), scaling.decisions.toReversed(), (one) => `${one.at} ${one.action}`, (one) =>
    line(decided(one), one.reason), timed);
}

export function decided(one) {
  return one.target === one.previous ? `${one.action} at ${one.target}` : `${one.action}: ${one.previous} → ${one.target}`;
}

function showUnmanaged(why) {
  for (const name of READOUTS) setText(at(`r-${name}`), "–");
  setText(at("table-of"), why);
  at("workers").value = "";
  at("dry-run").checked = false;
  at("newest-decisions").replaceChildren();
}
