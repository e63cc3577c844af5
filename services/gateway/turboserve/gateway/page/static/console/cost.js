// What a pool has cost over time, by tenant and by model, and the whole cost since the first worker.

import { duration, element, keyed, period, setCells, setText, showEmpty, tableRow } from "./elements.js";
import { Plot, pointsOf } from "./plot.js";

const at = (id) => document.getElementById(id);
const plot = new Plot(at("plot-cost"), {
  title: "Workers paid for, on average",
  unit: "workers",
  series: [{ key: "gpus", label: "paid for" }],
});

export const cost = {
  everyMs: 10_000,
  load: (read) => read("cost"),
  show(answer, range) {
    const points = pointsOf(answer).map((point) => ({ ...point, gpus: point.gpu_seconds / answer.step_s }));
    // The newest step is not over yet: its mean would always be low.
    plot.draw(range.live ? points.slice(0, -1) : points, range, answer.step_s);
    const money = moneyFormat(answer.currency);
    showShares("tenant", answer.tenants, money, (one) => one.tenant);
    showShares("model", answer.models, money, ({ model, width, height }) =>
      width ? `${model}, ${width}×${height}` : model);
    showEmpty(at("cost-empty"), !answer.tenants.length, `This pool had no worker ${period(range)}.`);
  },
};

// `nameOf` returns whose a share is; null: of no session.
function showShares(by, shares, money, nameOf) {
  const total = shares.reduce((sum, one) => sum + one.gpu_seconds, 0);
  const isPriced = shares.some((one) => one.money > 0);
  at(`${by}-table`).hidden = !shares.length;
  keyed(at(`${by}-rows`), shares, (one) => nameOf(one) ?? "", () => tableRow(4), (row, one) => {
    const share = total > 0 ? `${((one.gpu_seconds / total) * 100).toFixed(1)} %` : "–";
    const name = nameOf(one) ?? "no session: idle or starting";
    setCells(row, [name, duration(one.gpu_seconds), share, isPriced ? money.format(one.money) : "no price"]);
  });
}

function moneyFormat(currency) {
  return new Intl.NumberFormat([], { style: "currency", currency, maximumFractionDigits: 4 });
}

/** Show the report of `/v1/cost`, in which every tenant finds its own share. */
export function showTotals(report, pool) {
  const money = moneyFormat(report.currency);
  const amount = (one) => (one.money > 0 ? money.format(one.money) : duration(one.gpu_seconds));
  const own = report.pools.find((one) => one.pool === pool);
  setText(at("c-pool"), own ? amount(own) : "–");
  setText(at("c-total"), amount(report.total));
  setText(at("c-used"), amount(report.used));
  setText(at("c-idle"), amount(report.idle));
  at("no-price").hidden = report.total.money > 0;
  keyed(at("kinds"), report.kinds, (kind) => kind.kind, makeKind, (row, kind) => {
    const price = kind.price_per_gpu_hour;
    const starting = `${duration(kind.starting_gpu_seconds)} of them starting`;
    setText(row.children[0], price > 0 ? `${kind.kind} at ${money.format(price)}/h` : kind.kind);
    setText(row.children[1], `${duration(kind.gpu_seconds)}, ${starting}, ${kind.running} of ${kind.workers} running`);
  });
}

function makeKind() {
  const row = element("li");
  row.append(element("span"), element("span"));
  return row;
}
