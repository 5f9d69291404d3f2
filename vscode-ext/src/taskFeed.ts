/**
 * Keeps a TaskModel in step with the daemon: lists, subscribes, and asks again wherever an event is missing or a task unknown.
 */
import {
  SUBSCRIBE,
  type SubscribeAnswer,
  type SubscribeParams,
  TASK,
  TASKS,
  type Task,
  type TaskEvent,
  type TasksAnswer,
} from "./protocol";
import type { TaskModel } from "./taskModel";

/** Sends a request to the daemon. */
export type Request = <R>(method: string, params: object) => Promise<R>;

export class TaskFeed {
  private readonly fetching = new Map<string, TaskEvent[]>();

  constructor(
    private readonly model: TaskModel,
    private readonly request: Request,
    private readonly onChange: () => void,
    private readonly onError: (error: unknown) => void,
  ) {}

  /** To be called on every new connection. */
  async follow(): Promise<void> {
    this.fetching.clear();
    this.model.reset((await this.request<TasksAnswer>(TASKS, {})).tasks);
    this.onChange();
    const answer = await this.subscribe({ afterSeq: this.model.newest() });
    await Promise.all(this.model.continuations(answer).map((params) => this.subscribe(params)));
  }

  receive(event: TaskEvent): void {
    const held = this.fetching.get(event.taskId);
    if (held !== undefined) {
      held.push(event);
      return;
    }
    switch (this.model.apply(event)) {
      case "applied":
        this.onChange();
        break;
      case "gap":
        this.subscribe({ taskId: event.taskId, afterSeq: this.model.get(event.taskId)?.lastSeq ?? 0 }).catch(this.onError);
        break;
      case "unknown":
        this.fetch(event).catch(this.onError);
        break;
    }
  }

  /** Events name no kind and no file, so a task is asked for when its first one comes; those that follow wait for the answer. */
  private async fetch(first: TaskEvent): Promise<void> {
    const held = [first];
    this.fetching.set(first.taskId, held);
    try {
      this.model.put(await this.request<Task>(TASK, { taskId: first.taskId }));
    } finally {
      if (this.fetching.get(first.taskId) === held) {
        this.fetching.delete(first.taskId);
      }
    }
    this.onChange();
    for (const event of held) {
      this.receive(event);
    }
  }

  private subscribe(params: SubscribeParams): Promise<SubscribeAnswer> {
    return this.request<SubscribeAnswer>(SUBSCRIBE, params);
  }
}
