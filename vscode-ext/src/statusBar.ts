/** One status bar entry: how many tasks work, want a review, wait; or that there is no connection. */
import * as vscode from "vscode";
import { describeStatus } from "./labels";
import type { Task } from "./protocol";

export class StatusBar implements vscode.Disposable {
  private readonly item = vscode.window.createStatusBarItem("quadjet.status", vscode.StatusBarAlignment.Left);

  constructor() {
    this.item.name = "Quadjet";
    this.item.show();
  }

  update(tasks: readonly Task[], problem: string | undefined): void {
    const { text, tooltip, warns } = describeStatus(tasks, problem);
    this.item.text = text;
    this.item.tooltip = tooltip;
    this.item.backgroundColor = warns ? new vscode.ThemeColor("statusBarItem.warningBackground") : undefined;
    this.item.command = problem === undefined ? "quadjet.tasks.focus" : "quadjet.connect";
  }

  dispose(): void {
    this.item.dispose();
  }
}
