"""Modules of the page in an order of messages and answers that a browser makes only now and then."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

import turboserve.gateway.page
from tests.helpers.node import needs_node, output_of

PAGE = Path(turboserve.gateway.page.__path__[0]) / "static"
STUBS = """
const stored = {};
globalThis.sessionStorage = {
  getItem: (name) => stored[name] ?? null,
  setItem(name, value) { stored[name] = value; },
  removeItem(name) { delete stored[name]; },
};
globalThis.document = { hidden: false, body: { dataset: {} } };
globalThis.setInterval = () => 0;
globalThis.Option = class {};
const element = () => ({
  hidden: true, value: "", textContent: "",
  handlers: {}, children: {},
  addEventListener(type, handle) { this.handlers[type] = handle; },
  querySelector(what) { return (this.children[what] ??= element()); },
  focus() {}, setAttribute() {}, replaceChildren() {},
});
const seen = [];
/** Return once `check` is true. */
const until = async (check) => { while (!check()) await new Promise((resolve) => setTimeout(resolve, 5)); };
const finish = () => { console.log(JSON.stringify(seen)); process.exit(); };
"""
"""The little of a browser that the modules use here."""

pytestmark = needs_node


@pytest.fixture
def page(tmp_path: Path) -> Path:
    """The page's modules, where Node takes them for modules."""
    shutil.copytree(PAGE, tmp_path / "page")
    (tmp_path / "package.json").write_text('{"type": "module"}')
    return tmp_path / "page"


def played(page: Path, module: str, script: str) -> Any:
    """Run `script` with the exports of `module` as `page`. Returns what it has seen."""
    text = f"{STUBS}import(process.argv[1]).then(async (page) => {{{script}finish();}});"
    return json.loads(output_of(text, page / module))


KEYS = """
const refusal = (key) => ({
  code: "unauthorized", hadKey: key !== "", wasSentWith: (other) => other === key,
});
const checks = [];
const client = {
  key: "",
  models() {
    const key = this.key;
    const made = { key };
    checks.push(made);
    return new Promise((resolve, reject) => {
      made.accept = resolve;
      made.refuse = () => reject(refusal(key));
    });
  },
};
const form = element(), others = new BroadcastChannel("turboserve.key"), shared = [], answers = [];
let admitted = 0;
others.onmessage = ({ data }) => {
  if (data.entered) shared.push(data.entered);
  if (data.key) answers.push(data.key);
};
const keys = new page.KeyForm(client, form, () => { admitted += 1; });
const nextCheck = async (count) => { await until(() => checks.length === count); return checks.at(-1); };
const enter = (key) => {
  form.querySelector("input").value = key;
  form.handlers.submit({ preventDefault() {} });
};

await keys.ask(refusal(""));
seen.push(["asked", form.hidden]);

// A key of another tab is checked while the user enters one here. Its refusal comes last.
others.postMessage({ entered: "theirs" });
const theirs = await nextCheck(1);
enter("ours");
const ours = await nextCheck(2);
ours.accept();
await until(() => admitted === 1);
theirs.refuse();
await until(() => shared.length === 1);
seen.push(["own key", client.key, form.hidden]);

// While the key counts, an answer to another tab's question and a key entered in another tab change nothing.
others.postMessage({ key: "answered" });
others.postMessage({ entered: "new" });
// Messages keep their order: once this question is answered, those before it have come.
others.postMessage("wanted");
await until(() => answers.length === 1);
seen.push(["still", client.key, answers[0], checks.length]);
// The key is revoked, which this tab finds now.
keys.ask(refusal("ours"));
(await nextCheck(3)).accept();
await until(() => admitted === 2);
seen.push(["key of the other tab", client.key, form.hidden]);

// That one is revoked as well. It is not tried again, nor is an answer to another tab's question.
await keys.ask(refusal("new"));
others.postMessage({ key: "new" });
others.postMessage({ entered: "newest" });
const newest = await nextCheck(4);
newest.accept();
await until(() => admitted === 3);
seen.push(["newest", newest.key, form.hidden]);
// What came from another tab is not sent to others, which would send it back.
enter("last");
(await nextCheck(5)).accept();
await until(() => shared.length > 1);
seen.push(["shared", ...shared]);
"""


def test_a_key_that_the_user_enters_counts_once_and_for_tabs_that_need_it_later(page: Path) -> None:
    assert played(page, "keys.js", KEYS) == [
        ["asked", False],
        ["own key", "ours", True],
        ["still", "ours", "ours", 2],
        ["key of the other tab", "new", True],
        ["newest", "newest", True],
        ["shared", "ours", "last"],
    ]


MIGRATION = """
let answer;
const client = {
  workers: async () => [],
  session: () => ({ migrate: () => new Promise((resolve) => { answer = resolve; }) }),
};
const form = element(), field = element();
let migrating;
const shown = new page.MigrationForm(client, form, field, (action) => { migrating = action(); });
const migrate = () => form.handlers.submit({ preventDefault() {} });
const event = (newestEvent, target = null, worker = "a") => {
  shown.learn("ses_1", { worker, target, newestEvent });
  seen.push([newestEvent, field.textContent]);
};
const answered = async (newest_event) => {
  answer({ session: "ses_1", worker: "a", target: "b", newest_event });
  await migrating;
  seen.push(["answer", field.textContent]);
};
event(3);
migrate();
await answered(5);
event(4);
event(5, "b");
event(6, null, "b");
// An answer that its migration's end has overtaken.
migrate();
event(8, null, "b");
await answered(7);
// Another session counts from the beginning.
shown.learn(null);
event(1, null, "c");
"""


def test_an_event_that_a_migrations_answer_has_overtaken_changes_nothing(page: Path) -> None:
    assert played(page, "migration.js", MIGRATION) == [
        [3, "a"],
        ["answer", "a → b"],
        [4, "a → b"],
        [5, "a → b"],
        [6, "b"],
        [8, "b"],
        ["answer", "b"],
        [1, "c"],
    ]
