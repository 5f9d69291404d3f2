/** What menus, the task list and the command palette run. Failures are shown with what mends them. */
import * as vscode from "vscode";
import type { Daemon } from "./daemon";
import { explain, withoutLinks } from "./errors";
import { canStop, filePath, taskTitle } from "./labels";
import {
  ACCEPT,
  type AcceptParams,
  type AcceptResult,
  REJECT,
  type RejectParams,
  SEND_TO_AGENT,
  STOP_TASK,
  type Task,
  type TaskKind,
  type TaskParams,
} from "./protocol";
import { type Review, taskOf } from "./review";
import { sendArguments } from "./sendArguments";
import { hasOpenHunks, isDecidable, type TaskModel } from "./taskModel";
import type { TaskTree } from "./taskTree";

export function registerCommands(daemon: Daemon, model: TaskModel, tree: TaskTree, review: Review): vscode.Disposable[] {
  const onTask = (id: string, isFit: (task: Task) => boolean, run: (task: Task) => Promise<void>): vscode.Disposable =>
    register(id, async (argument: unknown) => {
      const task = await chooseTask(model, argument, isFit);
      return task && run(task);
    });
  return [
    register("quadjet.connect", () => daemon.connect()),
    ...sendCommands(daemon, "cleanup"),
    ...sendCommands(daemon, "triage"),
    register("quadjet.openSelected", async () => {
      const task = tree.selected && model.get(tree.selected.taskId);
      return task && openTask(review, task);
    }),
    onTask("quadjet.show", isKnown, (task) => review.openCard(task.taskId, taskTitle(task))),
    onTask("quadjet.review", hasOpenHunks, (task) => review.open(task.taskId, taskTitle(task))),
    onTask("quadjet.accept", isDecidable, (task) => accept(daemon, review, task)),
    onTask("quadjet.reject", isDecidable, (task) => reject(daemon, review, task)),
    onTask("quadjet.stop", canStop, async ({ taskId }) => {
      await daemon.request<Task>(STOP_TASK, { taskId } satisfies TaskParams);
    }),
  ];
}

function openTask(review: Review, task: Task): Promise<void> {
  return hasOpenHunks(task) ? review.open(task.taskId, taskTitle(task)) : review.openCard(task.taskId, taskTitle(task));
}

function isKnown(): boolean {
  return true;
}

function register(id: string, run: (...given: unknown[]) => Promise<void> | undefined): vscode.Disposable {
  return vscode.commands.registerCommand(id, async (...given: unknown[]) => {
    try {
      await run(...given);
    } catch (error) {
      void vscode.window.showErrorMessage(withoutLinks(`Quadjet: ${explain(error)}`));
    }
  });
}

// -- sending -------------------------------------------------------------------------------------------------------------

function sendCommands(daemon: Daemon, kind: TaskKind): vscode.Disposable[] {
  return [
    register(`quadjet.send.${kind}`, (uri, selected) => send(daemon, kind, targets(uri, selected))),
    register(`quadjet.send.${kind}WithInstruction`, async (uri, selected) => {
      const files = targets(uri, selected);
      const prompt = "What should the agent mind?";
      const instruction = await vscode.window.showInputBox({ title: "Send to Agent", prompt, ignoreFocusOut: true });
      if (instruction !== undefined) {
        await send(daemon, kind, files, instruction);
      }
    }),
  ];
}

interface Target {
  uri: vscode.Uri;
  selection?: vscode.Selection;
}

/** The explorer gives the clicked file and all selected ones, the editor's menu its document, the palette nothing. */
function targets(clicked: unknown, selected: unknown): Target[] {
  if (Array.isArray(selected)) {
    return selected.filter((item) => item instanceof vscode.Uri).map((uri) => ({ uri }));
  }
  const editor = vscode.window.activeTextEditor;
  if (editor !== undefined && (!(clicked instanceof vscode.Uri) || clicked.toString() === editor.document.uri.toString())) {
    return [{ uri: editor.document.uri, selection: editor.selection }];
  }
  return clicked instanceof vscode.Uri ? [{ uri: clicked }] : [];
}

async function send(daemon: Daemon, kind: TaskKind, files: Target[], instruction?: string): Promise<void> {
  if (files.length === 0) {
    throw new Error("No file is open. Open one, or right-click one in the explorer.");
  }
  for (const { uri, selection } of files) {
    await sendOne(daemon, kind, uri, selection, instruction);
  }
}

async function sendOne(daemon: Daemon, kind: TaskKind, uri: vscode.Uri, selection?: vscode.Selection, instruction?: string) {
  if (uri.scheme !== "file") {
    throw new Error(`${uri.path} is not a file on disk. Save it, and send it again.`);
  }
  const { converter } = daemon;
  const argument = sendArguments(kind, {
    uri: uri.toString(),
    ...(selection && converter && { selection: converter.asRange(selection) }),
    diagnostics: (await converter?.asDiagnostics(vscode.languages.getDiagnostics(uri))) ?? [],
    ...(instruction !== undefined && { instruction }),
  });
  await daemon.request("workspace/executeCommand", { command: SEND_TO_AGENT, arguments: [argument] });
}

// -- deciding ------------------------------------------------------------------------------------------------------------

async function accept(daemon: Daemon, review: Review, task: Task): Promise<void> {
  const { files } = await review.proposal(task.taskId);
  const flagged = files.filter((file) => file.flagged !== "");
  if (flagged.length > 0) {
    const detail = flagged.map((file) => `${filePath(file.uri)}: ${file.flagged}`).join("\n");
    const question = "Some files of this proposal deserve a second look. Accept all the same?";
    if ((await vscode.window.showWarningMessage(question, { modal: true, detail }, "Accept")) !== "Accept") {
      return;
    }
  }
  const result = await daemon.request<AcceptResult>(ACCEPT, { taskId: task.taskId } satisfies AcceptParams);
  if (result.conflicts.length === 0) {
    await review.closeTabs(task.taskId);
    return;
  }
  review.refresh(task.taskId);
  const conflicts = result.conflicts.map((conflict) => `${filePath(conflict.uri)}: ${conflict.message}`).join("; ");
  void vscode.window.showWarningMessage(withoutLinks(`Quadjet: not all was accepted. ${conflicts}`));
}

async function reject(daemon: Daemon, review: Review, task: Task): Promise<void> {
  const comment = await vscode.window.showInputBox({
    title: `Reject: ${taskTitle(task)}`,
    prompt: "What is wrong? With a comment the agent tries again. Without one the proposal is rejected for good.",
    ignoreFocusOut: true,
  });
  if (comment === undefined) {
    return;
  }
  await daemon.request<Task>(REJECT, { taskId: task.taskId, comment: comment.trim() } satisfies RejectParams);
  await review.closeTabs(task.taskId);
}

/** From the task list, from the title of a review, or asked for. */
async function chooseTask(model: TaskModel, argument: unknown, isFit: (task: Task) => boolean): Promise<Task | undefined> {
  const given = argument instanceof vscode.Uri ? taskOf(argument) : taskIdIn(argument);
  if (given !== undefined) {
    const task = model.get(given);
    if (task === undefined || !isFit(task)) {
      throw new Error(
        task ? `${taskTitle(task)} is ${task.state}: there is nothing to decide.` : "The daemon knows this task no more.",
      );
    }
    return task;
  }
  const fit = model.list().filter(isFit);
  if (fit.length === 0) {
    throw new Error("No task waits for this.");
  }
  const picks = fit.map((task) => ({ label: taskTitle(task), description: filePath(task.uri), task }));
  return (await vscode.window.showQuickPick(picks, { title: "Which task?" }))?.task;
}

function taskIdIn(argument: unknown): string | undefined {
  return typeof argument === "object" && argument !== null && "taskId" in argument ? String(argument.taskId) : undefined;
}
