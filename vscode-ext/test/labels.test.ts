import assert from "node:assert/strict";
import { test } from "node:test";
import { canStop, cardText, describeStatus, describeTask, taskTitle } from "../src/labels";
import { makeCard, makeTask } from "./samples";

test("a title names what is done, the file and the lines", () => {
  assert.equal(taskTitle(makeTask({ kind: "triage", uri: "file:///shop/tests/a%20b.py" })), "Find the cause a b.py");
  assert.equal(taskTitle(makeTask({ range: { first: 3, last: 9 } })), "Clean up cart.py:3-9");
});

test("a running task can be stopped and not reviewed", () => {
  const { description, icon, contextValue } = describeTask(makeTask({ state: "running", message: "turn 3" }));
  assert.deepEqual([description, icon, contextValue], ["running · turn 3", "sync~spin", "stop"]);
});

test("a proposal says whether it was verified", () => {
  const task = makeTask({ state: "proposed", hunkCounts: { pending: 1 }, card: makeCard({ verified: false }) });
  assert.deepEqual(
    [describeTask(task).description, describeTask(task).contextValue],
    ["to review, not verified", "review decide"],
  );
  assert.equal(canStop(task), false);
});

test("a parked task says why, and can be reviewed and stopped when hunks conflict", () => {
  const label = describeTask(makeTask({ state: "needs-you", reason: "conflict", hunkCounts: { conflict: 1 } }));
  assert.deepEqual([label.description, label.contextValue], ["needs you (conflict)", "review decide stop"]);
});

test("the card has the evidence, what could not be run included, and the findings that there are", () => {
  const evidence = [
    { name: "linter clean", passed: true, command: "ruff check", detail: "0 findings" },
    { name: "tests unchanged", passed: null, command: "", detail: "no sandbox" },
  ];
  const findings = { cause: "", fixed: ["F401", "E711"], line: 7 };
  const card = makeCard({ verified: false, evidence, findings, notes: ["not verified: no sandbox"] });
  assert.deepEqual(cardText(makeTask({ state: "proposed", message: "done", instruction: "keep names", card })).split("\n"), [
    "Clean up cart.py",
    "/shop/cart.py",
    "to review, not verified: done",
    "Instruction: keep names",
    "",
    "Cleaned up cart.py (not verified)",
    "[ok] linter clean (ruff check): 0 findings",
    "[not run] tests unchanged: no sandbox",
    "fixed: F401",
    "fixed: E711",
    "line: 7",
    "Note: not verified: no sandbox",
    "2 s, 2 turns",
    "",
  ]);
});

test("a message that only repeats the state is left out", () => {
  assert.equal(describeTask(makeTask({ state: "stopped", message: "stopped" })).description, "stopped");
});

test("a message of several lines is shown on one", () => {
  assert.equal(describeTask(makeTask({ message: "a\n  b" })).description, "running · a b");
});

test("the status bar counts working, proposed and waiting tasks", () => {
  const tasks = [makeTask({}), makeTask({ state: "queued" }), makeTask({ state: "proposed" }), makeTask({ state: "failed" })];
  assert.deepEqual(describeStatus(tasks, undefined), {
    text: "Quadjet $(sync~spin) 2 $(git-pull-request) 1",
    tooltip: "Quadjet: 2 working, 1 to review, 0 waiting for you",
    warns: false,
  });
  assert.equal(describeStatus([makeTask({ state: "needs-you" })], undefined).warns, true);
});

test("without a connection the status bar says why", () => {
  const { text, tooltip, warns } = describeStatus([makeTask({})], "no daemon");
  assert.deepEqual([text, tooltip.split("\n")[0], warns], ["$(warning) Quadjet", "no daemon", true]);
});
