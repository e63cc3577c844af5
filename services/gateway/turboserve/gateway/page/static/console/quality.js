// Late chunks, chunks below the best configuration, and how urgent the sessions of each worker are now.

import { keyed, number, setCells, showEmpty, tableRow } from "./elements.js";
import { Plot, pointsOf } from "./plot.js";

const at = (id) => document.getElementById(id);
const chunks = new Plot(at("plot-late"), {
  title: "Late chunks, and chunks below the best configuration",
  unit: "chunks",
  series: [
    { key: "late", label: "late" },
    { key: "lowered", label: "below the best" },
  ],
});
const debt = new Plot(at("plot-debt"), {
  title: "Quality debt, % of chunks",
  unit: "% of the last minute's chunks",
  series: [{ key: "debt", label: "lowered by load" }],
});
const deficit = new Plot(at("plot-deficit"), {
  title: "Expected late chunks",
  unit: "chunks",
  series: [{ key: "deficit", label: "expected" }],
});
let live = false;

export const quality = {
  everyMs: 5_000,
  load: (read) => read("history"),
  show(answer, range) {
    const points = pointsOf(answer).map((point) => ({
      ...point,
      debt: point.quality_debt === null ? null : point.quality_debt * 100,
    }));
    for (const plot of [chunks, debt, deficit]) plot.draw(points, range, answer.step_s);
    live = range.live;
    if (!live) showTiers(null);
  },
};

/** Show the members' newest reports. `pool` null: the past is shown. */
export function showTiers(pool) {
  if (pool !== null && !live) return;
  const rows = (pool?.members ?? []).filter((member) => member.playout);
  at("tier-table").hidden = !rows.length;
  keyed(at("tier-rows"), rows, (member) => member.member, () => tableRow(7), (row, { member, playout }) => {
    const share = playout.quality === null ? "–" : `${(playout.quality * 100).toFixed(1)} %`;
    const counts = [playout.urgent, playout.normal, playout.relaxed, playout.lowered].map(String);
    const slack = playout.slack_s === null ? "–" : `${number(playout.slack_s, 2)} s`;
    setCells(row, [member, ...counts, slack, share]);
  });
  const past = "Slack and tiers of workers are shown only live.";
  showEmpty(at("tiers-empty"), !rows.length, pool ? "No worker has reported its sessions' slack yet." : past);
}
