import assert from "node:assert/strict";
import { test } from "node:test";
import { setImmediate } from "node:timers/promises";
import type { EventData, SubscribeParams, Task, TaskEvent } from "../src/protocol";
import { TaskFeed } from "../src/taskFeed";
import { TaskModel } from "../src/taskModel";
import { makeEvent, makeTask } from "./samples";

/** A daemon with a journal per task, which answers like the real one: the answer first, then the events. */
class JournalDaemon {
  readonly asked: string[] = [];
  receive: (event: TaskEvent) => void = () => undefined;
  private readonly journals = new Map<string, TaskEvent[]>();

  log(taskId: string, type: string, data: EventData): TaskEvent {
    const journal = this.journals.get(taskId) ?? [];
    this.journals.set(taskId, journal);
    const event = makeEvent(taskId, journal.length + 1, type, data);
    journal.push(event);
    return event;
  }

  readonly request = async <R>(method: string, params: object): Promise<R> => {
    this.asked.push(`${method} ${JSON.stringify(params)}`);
    return this.answer(method, params) as R;
  };

  private answer(method: string, params: object): unknown {
    const tasks = [...this.journals].map(([taskId, journal]) => this.task(taskId, journal));
    switch (method) {
      case "agent/tasks":
        return { tasks };
      case "agent/task":
        return tasks.find((task) => task.taskId === (params as { taskId: string }).taskId);
      case "agent/subscribe":
        return this.subscribe(params as SubscribeParams);
      default:
        throw new Error(method);
    }
  }

  private task(taskId: string, journal: readonly TaskEvent[]): Task {
    const states = journal.filter((event) => event.type === "state");
    return makeTask({ taskId, lastSeq: journal.length, state: states.at(-1)?.data.state ?? "queued" });
  }

  private subscribe({ taskId, afterSeq }: SubscribeParams): unknown {
    const chosen = [...this.journals].filter(([id]) => taskId === undefined || id === taskId);
    for (const event of chosen.flatMap(([, journal]) => journal).filter((item) => item.seq > afterSeq)) {
      queueMicrotask(() => this.receive(event));
    }
    return { tasks: chosen.map(([id, journal]) => ({ taskId: id, lastSeq: journal.length })) };
  }
}

function connect(): { daemon: JournalDaemon; model: TaskModel; feed: TaskFeed; errors: unknown[] } {
  const daemon = new JournalDaemon();
  const model = new TaskModel();
  const errors: unknown[] = [];
  const feed = new TaskFeed(
    model,
    daemon.request,
    () => undefined,
    (error) => errors.push(error),
  );
  daemon.receive = (event) => feed.receive(event);
  return { daemon, model, feed, errors };
}

test("on connecting, tasks are listed and only the unfinished followed, from where they stand", async () => {
  const { daemon, model, feed } = connect();
  daemon.log("done", "state", { state: "accepted" });
  daemon.log("works", "state", { state: "running" });
  daemon.log("works", "turn", { number: 1 });
  await feed.follow();
  assert.equal(model.get("done")?.state, "accepted");
  assert.deepEqual(daemon.asked, [
    "agent/tasks {}",
    'agent/subscribe {"afterSeq":2}',
    'agent/subscribe {"taskId":"works","afterSeq":2}',
  ]);
});

test("a missed event is asked for again", async () => {
  const { daemon, model, feed } = connect();
  daemon.log("a", "state", { state: "running" });
  await feed.follow();
  daemon.log("a", "turn", { number: 1 }); // never delivered
  feed.receive(daemon.log("a", "state", { state: "verifying" }));
  await setImmediate();
  assert.deepEqual([model.get("a")?.turns, model.get("a")?.state], [1, "verifying"]);
});

test("a task of another client appears with its first event, and none of those that follow at once is lost", async () => {
  const { daemon, model, feed } = connect();
  await feed.follow();
  feed.receive(daemon.log("b", "state", { state: "queued" }));
  daemon.log("b", "state", { state: "running" });
  feed.receive(makeEvent("b", 2, "state", { state: "running" }));
  feed.receive(daemon.log("b", "turn", { number: 1 }));
  await setImmediate();
  assert.deepEqual([model.get("b")?.state, model.get("b")?.lastSeq], ["running", 3]);
  assert.equal(daemon.asked.filter((line) => line.startsWith("agent/task ")).length, 1);
});

test("after a lost connection the list is taken anew", async () => {
  const { daemon, model, feed } = connect();
  daemon.log("a", "state", { state: "running" });
  await feed.follow();
  daemon.log("a", "state", { state: "proposed" }); // while nobody listened
  await feed.follow();
  assert.equal(model.get("a")?.state, "proposed");
});

test("a request that fails is reported", async () => {
  const { feed, errors } = connect();
  feed.receive(makeEvent("gone", 1, "no-such-task", {}));
  await setImmediate();
  assert.equal(errors.length, 1);
});
