/** The connection to the daemon: finds the program, runs `quadjet lsp`, and says in one sentence why it is not there. */
import { type ChildProcess, type ChildProcessWithoutNullStreams, spawn } from "node:child_process";
import { once } from "node:events";
import { homedir } from "node:os";
import { setTimeout } from "node:timers/promises";
import * as vscode from "vscode";
import {
  CloseAction,
  type CloseHandlerResult,
  ErrorAction,
  type ErrorHandler,
  type ErrorHandlerResult,
  LanguageClient,
  type LanguageClientOptions,
  MessageType,
  ShowMessageNotification,
  type ShowMessageParams,
  State,
} from "vscode-languageclient/node";
import { explain, withoutLinks } from "./errors";
import { findExecutable } from "./executable";
import { TASK_EVENT, type TaskEvent } from "./protocol";

const MAX_RESTARTS = 4;
const RESTART_WINDOW_MS = 180_000;
const STDERR_CHARS = 2000;
const STDERR_WAIT_MS = 1000;

export class Daemon implements vscode.Disposable {
  private client: LanguageClient | undefined;
  private connecting: Promise<void> | undefined;
  private configured = "";
  private bridge: Bridge | undefined;
  private currentProblem: string | undefined = "Not connected yet.";
  private readonly output = vscode.window.createOutputChannel("Quadjet");
  private readonly changed = new vscode.EventEmitter<void>();
  private readonly told = new vscode.EventEmitter<TaskEvent>();
  /** Connected, or not any more: see `problem`. */
  readonly onDidChange = this.changed.event;
  readonly onTaskEvent = this.told.event;

  /** Why there is no connection; undefined while there is one. */
  get problem(): string | undefined {
    return this.currentProblem;
  }

  /** Connect, anew if need be. What goes wrong is shown, not thrown. */
  connect(): Promise<void> {
    this.connecting ??= this.replaceClient().finally(() => {
      this.connecting = undefined;
    });
    return this.connecting;
  }

  /** Connect anew if the setting names another program than the one in use. */
  async reconnect(): Promise<void> {
    await this.connecting;
    if (configuredPath() !== this.configured) {
      await this.connect();
    }
  }

  /** The answer of the daemon. Waits for a connection that is being made. */
  async request<R>(method: string, params: object): Promise<R> {
    await this.connecting;
    const client = this.client;
    if (client?.state === State.Starting) {
      await client.start(); // restarting by itself: the same promise
    }
    if (client?.state !== State.Running) {
      throw new Error(this.currentProblem ?? "The connection to the daemon was just lost. Try again.");
    }
    return client.sendRequest<R>(method, params);
  }

  /** How the client writes VS Code's ranges and diagnostics for the wire. */
  get converter(): LanguageClient["code2ProtocolConverter"] | undefined {
    return this.client?.code2ProtocolConverter;
  }

  async close(): Promise<void> {
    const client = this.client;
    this.client = undefined;
    if (client?.state === State.Running) {
      await client.stop();
    }
  }

  dispose(): void {
    this.output.dispose();
    this.changed.dispose();
    this.told.dispose();
  }

  private async replaceClient(): Promise<void> {
    await this.close();
    this.configured = configuredPath();
    const found = findExecutable(this.configured, process.env.PATH ?? "", homedir());
    if ("problem" in found) {
      this.fail(found.problem);
      return;
    }
    const client = this.createClient(found.path);
    this.client = client;
    try {
      await client.start();
    } catch (error) {
      this.fail(`${found.path} lsp did not start: ${(await this.bridge?.lastWords()) || explain(error)}`);
    }
  }

  private createClient(path: string): LanguageClient {
    const errorHandler = new RestartPolicy();
    const client = new QuietClient("quadjet", "Quadjet", () => this.startBridge(path), this.options(errorHandler));
    client.onNotification(TASK_EVENT, (event: TaskEvent) => this.told.fire(event));
    client.onNotification(ShowMessageNotification.type, showMessage);
    client.onDidChangeState(({ newState }) => {
      if (client !== this.client) {
        return; // replaced meanwhile
      }
      if (newState === State.Running) {
        errorHandler.hasRun = true;
        this.setProblem(undefined);
      } else if (newState === State.Stopped) {
        void this.explainEnd(client);
      }
    });
    return client;
  }

  private async explainEnd(client: LanguageClient): Promise<void> {
    const problem = (await this.bridge?.lastWords()) || "The connection to the daemon ended.";
    if (client === this.client && client.state !== State.Running) {
      this.setProblem(problem);
    }
  }

  private options(errorHandler: ErrorHandler): LanguageClientOptions {
    return {
      documentSelector: [{ scheme: "file" }], // all of them: unsaved text of any language is part of a task's snapshot
      outputChannel: this.output,
      initializationFailedHandler: () => false,
      errorHandler,
    };
  }

  private async startBridge(path: string): Promise<ChildProcess> {
    // From the home folder, so that nothing in a repository is found by a relative path.
    const child = spawn(path, ["lsp"], { cwd: homedir(), stdio: "pipe" });
    this.bridge = new Bridge(child);
    await once(child, "spawn"); // throws the reason if it cannot be run
    return child;
  }

  private fail(problem: string): void {
    this.setProblem(problem);
    void offerHelp(problem, this.output);
  }

  private setProblem(problem: string | undefined): void {
    this.currentProblem = problem;
    this.changed.fire();
  }
}

/** `quadjet lsp`, which attaches to the daemon or starts it. What it says on stderr is why it failed and what mends it. */
class Bridge {
  private stderr = "";
  private readonly closed: Promise<unknown>;

  constructor(child: ChildProcessWithoutNullStreams) {
    child.stderr.on("data", (data: Buffer) => {
      this.stderr = (this.stderr + data.toString()).slice(-STDERR_CHARS);
    });
    this.closed = new Promise((resolve) => child.once("close", resolve));
  }

  /** Its stderr, complete if it ends soon: the language client may hear of the end first. */
  async lastWords(): Promise<string> {
    await Promise.race([this.closed, setTimeout(STDERR_WAIT_MS, undefined, { ref: false })]);
    return this.stderr.trim();
  }
}

/** A connection that was there is made again, unless it keeps breaking; one that never came up will not now. */
class RestartPolicy implements ErrorHandler {
  hasRun = false;
  private readonly closings: number[] = [];

  error(): ErrorHandlerResult {
    return { action: ErrorAction.Continue, handled: true };
  }

  closed(): CloseHandlerResult {
    this.closings.push(Date.now());
    const isFlapping = this.closings.filter((time) => time > Date.now() - RESTART_WINDOW_MS).length > MAX_RESTARTS;
    return { action: this.hasRun && !isFlapping ? CloseAction.Restart : CloseAction.DoNotRestart, handled: true };
  }
}

/** Failures go to the log; the person is told once, by us, with what mends it. */
class QuietClient extends LanguageClient {
  override error(message: string, data?: unknown): void {
    super.error(message, data, false);
  }
}

function configuredPath(): string {
  return vscode.workspace.getConfiguration("quadjet").get<string>("path", "");
}

async function offerHelp(problem: string, output: vscode.OutputChannel): Promise<void> {
  const choice = await vscode.window.showErrorMessage(withoutLinks(`Quadjet: ${problem}`), "Open Settings", "Show Log");
  if (choice === "Open Settings") {
    await vscode.commands.executeCommand("workbench.action.openSettings", "quadjet.path");
  } else if (choice === "Show Log") {
    output.show();
  }
}

/** As the language client does it, but what a model wrote cannot become a link that runs a command. */
function showMessage({ type, message }: ShowMessageParams): void {
  const text = withoutLinks(message);
  if (type === MessageType.Error) {
    void vscode.window.showErrorMessage(text);
  } else if (type === MessageType.Warning) {
    void vscode.window.showWarningMessage(text);
  } else {
    void vscode.window.showInformationMessage(text);
  }
}
