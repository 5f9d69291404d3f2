/**
 * What a task has to show: a proposal in the native diff editor (each file as it is now, beside the same file with the hunks that
 * await a decision), or its result card as a read-only document.
 */
import * as vscode from "vscode";
import { cardText, filePath } from "./labels";
import { placeHunks } from "./placeHunks";
import { type ChangedFile, HUNKS, type Proposal, TASK, type Task } from "./protocol";
import type { Request } from "./taskFeed";

export const SCHEME = "quadjet";
type Side = "current" | "proposed" | "card";

export class Review implements vscode.TextDocumentContentProvider, vscode.Disposable {
  private readonly changed = new vscode.EventEmitter<vscode.Uri>();
  private readonly registrations: vscode.Disposable[];
  readonly onDidChange = this.changed.event;

  constructor(private readonly request: Request) {
    // Here rather than in a field's initializer: VS Code looks for onDidChange at once, and only once.
    this.registrations = [
      vscode.workspace.registerTextDocumentContentProvider(SCHEME, this),
      vscode.workspace.onDidChangeTextDocument(({ document }) => {
        if (document.uri.scheme === "file") {
          this.refreshWhere((uri) => uri.path === document.uri.path);
        }
      }),
    ];
  }

  proposal(taskId: string): Promise<Proposal> {
    return this.request<Proposal>(HUNKS, { taskId });
  }

  async open(taskId: string, title: string): Promise<void> {
    this.refresh(taskId); // the editor may have kept documents from before
    const { files } = await this.proposal(taskId);
    const resources = files.map(({ uri }): [vscode.Uri, vscode.Uri, vscode.Uri] => {
      const file = vscode.Uri.parse(uri, true);
      return [file, virtualUri(taskId, file, "current"), virtualUri(taskId, file, "proposed")];
    });
    const [only, ...others] = resources;
    if (only === undefined) {
      void vscode.window.showInformationMessage(`Quadjet: ${title} proposes no change.`);
    } else if (others.length === 0) {
      await vscode.commands.executeCommand("vscode.diff", only[1], only[2], title, { preview: false });
    } else {
      await vscode.commands.executeCommand("vscode.changes", title, resources);
    }
  }

  async openCard(taskId: string, title: string): Promise<void> {
    this.refresh(taskId);
    await vscode.window.showTextDocument(virtualUri(taskId, vscode.Uri.file(`/${title}.txt`), "card"));
  }

  /** Something happened to the task: what is on screen of it is computed again. */
  refresh(taskId: string): void {
    this.refreshWhere((uri) => taskOf(uri) === taskId);
  }

  private refreshWhere(isStale: (uri: vscode.Uri) => boolean): void {
    for (const { uri } of vscode.workspace.textDocuments) {
      if (uri.scheme === SCHEME && isStale(uri)) {
        this.changed.fire(uri);
      }
    }
  }

  /** Nothing is left to decide: single diffs are closed. The API does not let us see which task an editor of many files is for. */
  async closeTabs(taskId: string): Promise<void> {
    const tabs = vscode.window.tabGroups.all.flatMap((group) => group.tabs);
    const ours = tabs.filter(({ input }) => input instanceof vscode.TabInputTextDiff && taskOf(input.modified) === taskId);
    await vscode.window.tabGroups.close(ours);
  }

  async provideTextDocumentContent(uri: vscode.Uri): Promise<string> {
    const taskId = taskOf(uri);
    const file = uri.with({ scheme: "file", query: "" });
    if (taskId === undefined) {
      throw new Error(`${uri.toString()} names no task`);
    }
    const side = new URLSearchParams(uri.query).get("side") as Side;
    return side === "card" ? cardText(await this.request<Task>(TASK, { taskId })) : this.fileText(taskId, file, side);
  }

  private async fileText(taskId: string, file: vscode.Uri, side: Side): Promise<string> {
    const { hunks, files } = await this.proposal(taskId);
    const change = files.find((item) => vscode.Uri.parse(item.uri, true).toString() === file.toString());
    if (change === undefined) {
      return ""; // the task was taken up again and leaves this file alone
    }
    const current = change.kind === "create" ? "" : await textOf(file);
    if (side === "current") {
      return current;
    }
    if (change.kind === "delete") {
      return "";
    }
    return (
      placeHunks(
        current,
        hunks.filter((hunk) => hunk.uri === change.uri),
        change.diff,
      ) ?? unplaced(change)
    );
  }

  dispose(): void {
    vscode.Disposable.from(...this.registrations).dispose();
    this.changed.dispose();
  }
}

/** The task whose review this virtual document belongs to. */
export function taskOf(uri: vscode.Uri): string | undefined {
  return uri.scheme === SCHEME ? (new URLSearchParams(uri.query).get("task") ?? undefined) : undefined;
}

function virtualUri(taskId: string, file: vscode.Uri, side: Side): vscode.Uri {
  // The path is the file's own, so the editor picks the language and the name to show by it.
  return file.with({ scheme: SCHEME, query: new URLSearchParams({ task: taskId, side }).toString() });
}

/** Unsaved text first. A file is not opened for this: the daemon deletes no file that is open in an editor. */
async function textOf(file: vscode.Uri): Promise<string> {
  const open = vscode.workspace.textDocuments.find((document) => document.uri.toString() === file.toString());
  if (open !== undefined) {
    return open.getText();
  }
  try {
    return new TextDecoder().decode(await vscode.workspace.fs.readFile(file));
  } catch (error) {
    if (error instanceof vscode.FileSystemError && error.code === "FileNotFound") {
      return "";
    }
    throw error;
  }
}

function unplaced({ uri, diff }: ChangedFile): string {
  return (
    `${filePath(uri)} changed where the task wants to change it, so the result cannot be shown line by line.\n` +
    `Accepting tries a three-way merge, and leaves the file as it is if that fails. Against the task's snapshot:\n\n${diff}`
  );
}
