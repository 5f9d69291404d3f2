/** The task list in the side bar. Its badge counts the tasks that wait for the person. */
import * as vscode from "vscode";
import { describeTask } from "./labels";
import type { Task } from "./protocol";
import { type TaskModel, wantsAttention } from "./taskModel";

export class TaskTree implements vscode.TreeDataProvider<Task>, vscode.Disposable {
  private readonly changed = new vscode.EventEmitter<void>();
  private readonly view: vscode.TreeView<Task>;
  readonly onDidChangeTreeData = this.changed.event;

  constructor(private readonly model: TaskModel) {
    this.view = vscode.window.createTreeView("quadjet.tasks", { treeDataProvider: this });
  }

  get selected(): Task | undefined {
    return this.view.selection[0];
  }

  refresh(): void {
    const waiting = this.model.list().filter(wantsAttention).length;
    this.view.badge = waiting > 0 ? { value: waiting, tooltip: `${waiting} waiting for you` } : undefined;
    this.changed.fire();
  }

  getChildren(task?: Task): Task[] {
    return task === undefined ? this.model.list() : [];
  }

  getTreeItem(task: Task): vscode.TreeItem {
    const { label, description, tooltip, icon, contextValue } = describeTask(task);
    const item = new vscode.TreeItem(label);
    item.id = task.taskId;
    item.description = description;
    item.tooltip = tooltip;
    item.iconPath = new vscode.ThemeIcon(icon);
    item.contextValue = contextValue;
    // Without arguments: VS Code forgets those of a row that was refreshed between the click and the command.
    item.command = { command: "quadjet.openSelected", title: "Open" };
    return item;
  }

  dispose(): void {
    this.view.dispose();
    this.changed.dispose();
  }
}
