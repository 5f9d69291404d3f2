/**
 * The tasks as the daemon last told: a listing first, then each task's events in order. Tasks are replaced, never changed.
 */
import type { Hunk, HunkState, SubscribeAnswer, SubscribeParams, Task, TaskEvent, TaskState } from "./protocol";

/** What became of an event. After "gap" and "unknown" the task must be asked for again from where it stands here. */
export type Applied = "applied" | "seen" | "gap" | "unknown";

const FINAL: ReadonlySet<TaskState> = new Set(["accepted", "rejected", "failed", "stopped"]);

export function isFinal(task: Task): boolean {
  return FINAL.has(task.state);
}

/** True if hunks wait for a decision. */
export function hasOpenHunks(task: Task): boolean {
  return wantsAttention(task) && (task.hunkCounts.pending ?? 0) + (task.hunkCounts.conflict ?? 0) > 0;
}

/** True if the task can be accepted or rejected. A result without a change, such as a cause found, is taken note of that way. */
export function isDecidable(task: Task): boolean {
  return task.state === "proposed" || hasOpenHunks(task);
}

/** True if the task goes no further without the person. */
export function wantsAttention(task: Task): boolean {
  return task.state === "proposed" || task.state === "needs-you";
}

export class TaskModel {
  private tasks = new Map<string, Task>();

  reset(tasks: readonly Task[]): void {
    this.tasks = new Map(tasks.map((task) => [task.taskId, task]));
  }

  put(task: Task): void {
    const known = this.tasks.get(task.taskId);
    // An answer that crossed with events is older than what they said.
    if (known === undefined || known.lastSeq <= task.lastSeq) {
      this.tasks.set(task.taskId, task);
    }
  }

  get(taskId: string): Task | undefined {
    return this.tasks.get(taskId);
  }

  /** Newest first, those that want the person before all others. */
  list(): Task[] {
    return [...this.tasks.values()].sort(
      (a, b) => Number(wantsAttention(b)) - Number(wantsAttention(a)) || b.created - a.created || (a.taskId < b.taskId ? -1 : 1),
    );
  }

  apply(event: TaskEvent): Applied {
    const task = this.tasks.get(event.taskId);
    if (task === undefined) {
      return "unknown";
    }
    if (event.seq <= task.lastSeq) {
      return "seen";
    }
    if (event.seq > task.lastSeq + 1) {
      return "gap";
    }
    this.tasks.set(task.taskId, after(task, event));
    return "applied";
  }

  /** Subscribe to all with this: no task's history is replayed. */
  newest(): number {
    return Math.max(0, ...[...this.tasks.values()].map((task) => task.lastSeq));
  }

  /** What to subscribe to beside, so that unfinished tasks and those begun meanwhile go on without a gap. */
  continuations(answer: SubscribeAnswer): SubscribeParams[] {
    const wanted = answer.tasks.filter(({ taskId }) => {
      const task = this.tasks.get(taskId);
      return task === undefined || !isFinal(task);
    });
    return wanted.map(({ taskId }) => ({ taskId, afterSeq: this.tasks.get(taskId)?.lastSeq ?? 0 }));
  }
}

function after(before: Task, { type, data, seq }: TaskEvent): Task {
  const task = { ...before, lastSeq: seq };
  switch (type) {
    case "state":
      return { ...task, state: data.state ?? task.state, reason: data.reason ?? null, message: data.message ?? "" };
    case "progress":
      return { ...task, message: progressText(data.message ?? "", data.done, data.total) };
    case "turn":
      return { ...task, turns: data.number ?? task.turns, message: `turn ${data.number ?? task.turns}` };
    case "card":
      return { ...task, card: data.card ?? null };
    case "hunks":
      return { ...task, hunkCounts: countHunks(data.hunks ?? []) };
    default:
      return task;
  }
}

function progressText(message: string, done: number | undefined, total: number | undefined): string {
  return total ? `${message} (${done ?? 0}/${total})` : message;
}

function countHunks(hunks: readonly Hunk[]): Task["hunkCounts"] {
  const counts: Partial<Record<HunkState, number>> = {};
  for (const { state } of hunks) {
    counts[state] = (counts[state] ?? 0) + 1;
  }
  return counts;
}
