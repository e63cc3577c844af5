// The messages of a stream that mean the same over WebSocket and WebRTC: the greeting, problems and events.

import { ProtocolError, problemError } from "./errors.js";
import type { ConnectionHandlers } from "./connection.js";
import type { Problem, ProblemError } from "./errors.js";
import type { ChunkMessage, End, Hello, Init, SessionEvent, Skip } from "./models.js";
import type { Session } from "./session.js";

const PROTOCOL_VERSION = 1;

/** A problem. With an `id` it answers a message of the client. */
export interface ErrorMessage extends Problem {
  type: "error";
  id?: string;
}

/** What the gateway sends, with the binary data of `init` and `chunk` behind them over a WebSocket. */
export type StreamMessage = Hello | Init | ChunkMessage | Skip | ErrorMessage | End | SessionEvent;

export class StreamMessages {
  /** Number of the newest event that came, after which a next connection continues; null: none is known. */
  eventsAfter: number | null;

  constructor(session: Session, on: Pick<ConnectionHandlers, "hello" | "event" | "problem">, eventsAfter?: number) {
    this.eventsAfter = eventsAfter ?? null;
    this.#session = session;
    this.#on = on;
  }

  #session: Session;
  #on: Pick<ConnectionHandlers, "hello" | "event" | "problem">;
  #newestEvent = 0;

  /** Return the error of a `hello` in another version of the protocol; null: this client knows the version. */
  versionError({ protocol_version: version }: Hello): ProtocolError | null {
    if (version === PROTOCOL_VERSION) return null;
    return new ProtocolError(
      `the gateway has version ${version} of the protocol, and this client ${PROTOCOL_VERSION}`,
    );
  }

  /** Take a `hello` whose version is known. */
  greet(message: Hello): void {
    this.#session.client.gateways.learn(message.gateways ?? []);
    this.#newestEvent = message.newest_event;
    this.eventsAfter ??= message.events_after;
    this.#on.hello?.(message);
  }

  /** Take an `error`, and return it. With an `id` it answers a message of the client, and the stream continues. */
  problem(message: ErrorMessage, key: string): ProblemError {
    const error = problemError(message, { key });
    if (message.id) this.#on.problem?.(error);
    return error;
  }

  /** Take an event. Answers to messages of the client, and types of a newer gateway, have no number. */
  event(message: SessionEvent): void {
    if (message.sequence === undefined) return;
    this.eventsAfter = message.sequence;
    this.#on.event?.(message, message.sequence > this.#newestEvent);
  }
}
