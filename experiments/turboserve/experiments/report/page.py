"""The page: a summary, then each experiment with its sentences, charts, numbers and declarations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from turboserve.experiments.paper.command import EXPERIMENTS
from turboserve.experiments.report.charts import CHARTS, pairs
from turboserve.experiments.report.results import RESULTS, TITLES, Result, unseen

UNSEEN = "unseen"


@dataclass(frozen=True)
class Source:
    """One file of results."""

    file: str
    value: Mapping[str, Any]

    def text(self, draws: int | None = None) -> str:
        """Say when and where the file was made. `draws`: of an experiment that has its own number."""
        its = self.value
        parts = [its.get("at", ""), f"source {its['source']}" if "source" in its else "",
                 its.get("machine", {}).get("processor", "")]  # fmt: skip
        if "quick" in its:
            parts.append("quick run" if its["quick"] else "whole run")
            count = len(its["seeds"]) if draws is None else draws
            parts.append(f"{count} draw" + "s" * (count != 1))
        return f"{self.file}: {', '.join(part for part in parts if part)}"


@dataclass(frozen=True)
class Section:
    """One experiment."""

    name: str
    results: Sequence[Result]
    charts: Sequence[str]
    rows: Sequence[tuple[str, str, str]] = ()
    met: Mapping[str, Any] | None = None
    wanted: Mapping[str, Any] | None = None
    declared: Mapping[str, Any] | None = None
    source: str = ""


def sections(sources: Sequence[Source]) -> Iterator[Section]:
    """Return the experiments of all files, in the order of the files."""
    for source in sources:
        for name, report in source.value.get("experiments", {}).items():
            if name in RESULTS and "error" not in report:
                results = RESULTS[name](report)
                more = CHARTS[name](report) if name in CHARTS else []
                charts = [*pairs(TITLES[name], results), *more]
                yield Section(
                    name, results, charts, EXPERIMENTS[name].rows(report), report["met"], report["wanted"],
                    report["declared"], source.text(report.get("draws")),
                )  # fmt: skip
        found = source.value.get(UNSEEN)
        if found:
            results = unseen(found)
            rows = [
                (f"{trace}: {system.replace('_', ' ')}", "", _against(row[system]))
                for trace, row in found.items()
                for system in ("learned", "shipped_table")
            ]
            charts = pairs("Cost at equal lateness, with the best constant known beforehand", results)
            yield Section(UNSEEN, results, charts, rows, source=source.text())


def _against(row: Mapping[str, Any]) -> str:
    return (
        f"{row['cost_of_oracle']:.3f} × oracle, {row['late_activations']} late of {row['activations']}, "
        f"{_percent(row['dearer_than_constant_percent'])} to the best constants, "
        f"{_percent(row['dearer_than_utilization_percent'])} to utilization autoscaling"
    )


def _percent(value: float | None) -> str:
    return "no run so late" if value is None else f"{value:+.1f} %"


def page(title: str, found: Sequence[Section]) -> str:
    """Return the whole page."""
    body = "".join(_section(section) for section in found)
    contents = "".join(f'<a href="#{s.name}">{escape(TITLES[s.name])}</a>' for s in found)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><style>{STYLE}</style></head>'
        f"<body><main><h1>{escape(title)}</h1>{_summary(found)}<nav>{contents}</nav>{body}</main></body></html>\n"
    )


def _summary(found: Sequence[Section]) -> str:
    counts = Counter(result.verdict for section in found for result in section.results)
    wanted = Counter(bool(met) for section in found for met in (section.met or {}).values())
    return (
        "<p>TurboServe's evaluation, and parts of NeuStream's and SlackServe's, replayed on the product's "
        "own placement and autoscaling with declared workers. Gray is published, blue is ours. A result is "
        "<em>equal</em> if it is within its 95 % interval over draws or within 2 % of the reference.</p>"
        f'<p class="counts">{_badge("better")} {counts["better"]} {_badge("equal")} {counts["equal"]} '
        f"{_badge('worse')} {counts['worse']} {_badge('new')} {counts['new']} without a published number. "
        f"Goals met: {wanted[True]} of {wanted.total()}.</p>"
    )


def _badge(verdict: str) -> str:
    return f'<b class="badge {verdict}">{verdict}</b>'


def _section(section: Section) -> str:
    sentences = "".join(f"<li>{_badge(r.verdict)} {escape(r.sentence)}</li>" for r in section.results)
    rows = "".join(
        f"<tr><td>{escape(what)}</td><td>{escape(paper)}</td><td>{escape(ours)}</td></tr>"
        for what, paper, ours in section.rows
    )
    numbers = (
        '<details><summary>All numbers</summary><div class="scroll"><table><thead><tr><th>what</th>'
        f"<th>paper</th><th>ours</th></tr></thead><tbody>{rows}</tbody></table></div></details>"
    )
    goals = "".join(
        f"<li>{'met' if met else 'missed'}: {escape(name.replace('_', ' '))} "
        f"(limit {escape(str((section.wanted or {}).get(name)))})</li>"
        for name, met in (section.met or {}).items()
    )
    declared = "".join(
        f"<dt>{escape(name.replace('_', ' '))}</dt><dd>{escape(_plain(value))}</dd>"
        for name, value in (section.declared or {}).items()
    )
    return (
        f'<section id="{section.name}"><h2>{escape(TITLES[section.name])}</h2>'
        f'<ul class="results">{sentences}</ul>'
        f'<div class="charts">{"".join(section.charts)}</div>{numbers}'
        + (f"<details><summary>Goals</summary><ul>{goals}</ul></details>" if goals else "")
        + (f"<details><summary>Declared</summary><dl>{declared}</dl></details>" if declared else "")
        + f'<p class="source">{escape(section.source)}</p></section>'
    )


def _plain(value: object) -> str:
    """Format a declared value as text."""
    if isinstance(value, Mapping):
        return "; ".join(f"{name}: {_plain(each)}" for name, each in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(_plain(each) for each in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


STYLE = """
:root{--bg:#fff;--fg:#1b1f24;--muted:#57606a;--line:#d8dee4;--paper:#8c959f;--c0:#0969da;--c1:#bc4c00;
--c2:#1a7f37;--c3:#8250df;--c4:#9a6700;--c5:#bf3989;color-scheme:light dark}
@media(prefers-color-scheme:dark){:root{--bg:#0d1117;--fg:#e6edf3;--muted:#9198a1;--line:#30363d;
--paper:#7d8590;--c0:#4493f8;--c1:#f0883e;--c2:#3fb950;--c3:#ab7df8;--c4:#d29922;--c5:#db61a2}}
*{box-sizing:border-box}
body{margin:0;background:var(--bg);color:var(--fg);font:16px/1.5 system-ui,sans-serif}
main{max-width:1240px;margin:0 auto;padding:16px}
h1{font-size:1.7rem;margin:.4rem 0}
h2{margin:0 0 .5rem;font-size:1.25rem}
section{border-top:1px solid var(--line);padding:20px 0}
nav{display:flex;flex-wrap:wrap;gap:4px 14px;margin:8px 0 20px}
a{color:var(--c0)}
.results{list-style:none;padding:0;margin:0 0 10px;columns:26rem;column-gap:28px}
.results li{break-inside:avoid;margin:3px 0;padding-left:4.4rem;text-indent:-4.4rem}
.badge{display:inline-block;min-width:3.9rem;text-align:center;text-indent:0;font-size:.75rem;
border-radius:4px;padding:0 5px;color:#fff;margin-right:.3rem}
.better{background:#1a7f37}
.equal{background:#0969da}
.worse{background:#cf222e}
.new{background:#6e7781}
.charts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(100%,370px),1fr));gap:18px;
align-items:start}
figure{margin:0;min-width:0}
figcaption{font-size:.9rem;font-weight:600}
svg{width:100%;height:auto;display:block}
svg text{font:11px system-ui,sans-serif;fill:var(--fg)}
svg .v{font-size:10px;fill:var(--muted)}
svg .g{stroke:var(--line);stroke-width:.7}
.keys{display:flex;flex-wrap:wrap;gap:2px 12px;font-size:.8rem;color:var(--muted)}
.keys i{display:inline-block;width:14px;height:4px;margin-right:5px;vertical-align:middle}
details{margin-top:10px}
summary{cursor:pointer}
.scroll{overflow-x:auto}
table{border-collapse:collapse;font-size:.85rem}
td,th{text-align:left;padding:3px 10px 3px 0;border-bottom:1px solid var(--line);vertical-align:top}
dt{font-weight:600}
dd{margin:0 0 6px;overflow-wrap:anywhere}
.source,.counts{color:var(--muted);font-size:.85rem;overflow-wrap:anywhere}
"""
