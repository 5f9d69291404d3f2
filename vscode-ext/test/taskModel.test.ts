import assert from "node:assert/strict";
import { test } from "node:test";
import { hasOpenHunks, isDecidable, TaskModel } from "../src/taskModel";
import { makeEvent, makeHunk, makeTask } from "./samples";

function modelOf(...tasks: Parameters<typeof makeTask>[0][]): TaskModel {
  const model = new TaskModel();
  model.reset(tasks.map(makeTask));
  return model;
}

test("a state event sets state, reason and message", () => {
  const model = modelOf({ taskId: "a", lastSeq: 3 });
  const event = makeEvent("a", 4, "state", { state: "needs-you", reason: "question", message: "which test?" });
  assert.equal(model.apply(event), "applied");
  const { state, reason, message, lastSeq } = model.get("a") ?? makeTask({});
  assert.deepEqual([state, reason, message, lastSeq], ["needs-you", "question", "which test?", 4]);
});

test("progress shows how far it is", () => {
  const model = modelOf({ taskId: "a" });
  model.apply(makeEvent("a", 1, "progress", { message: "loading the model", done: 3, total: 9 }));
  assert.equal(model.get("a")?.message, "loading the model (3/9)");
});

test("hunks are counted by state", () => {
  const model = modelOf({ taskId: "a" });
  const hunks = [makeHunk({ state: "pending" }), makeHunk({ state: "accepted" }), makeHunk({ state: "pending" })];
  model.apply(makeEvent("a", 1, "hunks", { hunks }));
  assert.deepEqual(model.get("a")?.hunkCounts, { pending: 2, accepted: 1 });
});

test("an event of a type not known here still counts", () => {
  const model = modelOf({ taskId: "a" });
  model.apply(makeEvent("a", 1, "from-a-later-daemon", {}));
  assert.equal(model.apply(makeEvent("a", 2, "turn", { number: 1 })), "applied");
});

test("an event is applied once", () => {
  const model = modelOf({ taskId: "a", lastSeq: 2, turns: 1 });
  assert.equal(model.apply(makeEvent("a", 2, "turn", { number: 9 })), "seen");
  assert.equal(model.get("a")?.turns, 1);
});

test("a gap in the sequence changes nothing", () => {
  const model = modelOf({ taskId: "a", lastSeq: 2 });
  assert.equal(model.apply(makeEvent("a", 4, "state", { state: "failed" })), "gap");
  assert.equal(model.get("a")?.lastSeq, 2);
});

test("an event of a task not known here", () => {
  assert.equal(modelOf().apply(makeEvent("a", 1, "state", { state: "queued" })), "unknown");
});

test("an answer older than the events does not set the task back", () => {
  const model = modelOf({ taskId: "a", lastSeq: 5, state: "verifying" });
  model.put(makeTask({ taskId: "a", lastSeq: 4, state: "running" }));
  assert.equal(model.get("a")?.state, "verifying");
});

test("what waits for the person comes first, then the newest", () => {
  const model = modelOf(
    { taskId: "old", created: 1 },
    { taskId: "waits", created: 2, state: "proposed" },
    { taskId: "new", created: 3 },
  );
  assert.deepEqual(
    model.list().map((task) => task.taskId),
    ["waits", "new", "old"],
  );
});

test("unfinished and unknown tasks are continued, finished ones are not", () => {
  const model = modelOf({ taskId: "done", state: "accepted", lastSeq: 90 }, { taskId: "works", state: "running", lastSeq: 7 });
  const answer = { tasks: ["done", "works", "begun"].map((taskId) => ({ taskId, lastSeq: 99 })) };
  assert.equal(model.newest(), 90);
  assert.deepEqual(model.continuations(answer), [
    { taskId: "works", afterSeq: 7 },
    { taskId: "begun", afterSeq: 0 },
  ]);
});

test("open hunks are those undecided or in conflict of a task that waits for the person", () => {
  assert.equal(hasOpenHunks(makeTask({ state: "proposed", hunkCounts: { pending: 1 } })), true);
  assert.equal(hasOpenHunks(makeTask({ state: "needs-you", hunkCounts: { conflict: 1 } })), true);
  assert.equal(hasOpenHunks(makeTask({ state: "proposed", hunkCounts: { accepted: 1 } })), false);
  assert.equal(hasOpenHunks(makeTask({ state: "accepted", hunkCounts: { pending: 1 } })), false);
});

test("a proposal without a change can be decided on, a question cannot", () => {
  assert.equal(isDecidable(makeTask({ state: "proposed" })), true);
  assert.equal(isDecidable(makeTask({ state: "needs-you", reason: "question" })), false);
});
