/** Wires the parts together; each is described in its own file. */
import * as vscode from "vscode";
import { registerCommands } from "./commands";
import { Daemon } from "./daemon";
import { explain, withoutLinks } from "./errors";
import { Review } from "./review";
import { StatusBar } from "./statusBar";
import { TaskFeed } from "./taskFeed";
import { TaskModel } from "./taskModel";
import { TaskTree } from "./taskTree";

let daemon: Daemon | undefined;

export async function activate(context: vscode.ExtensionContext): Promise<void> {
  const connection = new Daemon();
  daemon = connection;
  const request = <R>(method: string, params: object): Promise<R> => connection.request<R>(method, params);
  const showError = (error: unknown): void => {
    void vscode.window.showErrorMessage(withoutLinks(`Quadjet: ${explain(error)}`));
  };
  const model = new TaskModel();
  const tree = new TaskTree(model);
  const statusBar = new StatusBar();
  const review = new Review(request);
  const show = (): void => {
    tree.refresh();
    statusBar.update(model.list(), connection.problem);
  };
  const feed = new TaskFeed(model, request, show, showError);
  context.subscriptions.push(connection, tree, statusBar, review, ...registerCommands(connection, model, tree, review));
  context.subscriptions.push(
    connection.onDidChange(() => {
      show();
      if (connection.problem === undefined) {
        feed.follow().catch(showError);
      }
    }),
    connection.onTaskEvent((event) => {
      feed.receive(event);
      review.refresh(event.taskId);
    }),
    vscode.workspace.onDidChangeConfiguration((change) => {
      if (change.affectsConfiguration("quadjet.path")) {
        void connection.reconnect();
      }
    }),
  );
  show();
  await connection.connect();
}

export async function deactivate(): Promise<void> {
  await daemon?.close();
}
