// Who waits for a slot: now by session, over time by number.

import { duration, keyed, setCells, setText, showEmpty, tableRow } from "./elements.js";
import { Plot, pointsOf } from "./plot.js";
import { counted } from "../words.js";

const at = (id) => document.getElementById(id);
const plot = new Plot(at("plot-queue"), {
  title: "Sessions that wait for a slot",
  unit: "sessions",
  series: [{ key: "waiting", label: "waiting" }],
});

export const queue = {
  everyMs: 2_000,
  async load(read, range) {
    const history = await read("history");
    return { history, waiting: range.live ? await read("queue") : null };
  },
  show({ history, waiting }, range) {
    plot.draw(pointsOf(history), range, history.step_s);
    const rows = waiting?.sessions ?? [];
    at("queue-table").hidden = !rows.length;
    const now = Date.parse(waiting?.at ?? 0);
    keyed(at("queue-rows"), rows, (one) => one.session, () => tableRow(5), (row, one) => {
      const waited = duration(Math.max(now - Date.parse(one.since), 0) / 1_000);
      setCells(row, [one.session, one.tenant, waited, String(one.weight), one.reason ?? "no decision yet"]);
    });
    const past = "Who waited in a past hour is not kept, only how many. Choose “Live” for the list.";
    showEmpty(at("queue-empty"), !rows.length, waiting ? "No session waits for a slot now." : past);
    const more = (waiting?.total ?? 0) - rows.length;
    at("queue-more").hidden = more <= 0;
    setText(at("queue-more"), `${counted(more, "more session waits", "more sessions wait")}.`);
  },
};
