// The WebSocket of one session: pairs JSON with the binary behind it, reconnects where it stopped.

const FIRST_WAIT_MS = 250;
const LONGEST_WAIT_MS = 2000;
const FOR_GOOD = new Set([4401, 4403, 4404]);

export class Stream {
  // on: hello, init, skip, chunk, event(message, isNew), end, problem, lost(waitMs), gone(problem)
  constructor(api, session, on) {
    this.session = session;
    this.lastIndex = null;
    this.#api = api;
    this.#on = on;
    this.#open();
  }

  #api;
  #on;
  #socket = null;
  #announced = null;
  #eventsAfter = 0;
  #newestEvent = 0;
  #failures = 0;
  #timer = 0;
  #closed = false;
  #last = null;
  #key = "";

  close() {
    this.#closed = true;
    clearTimeout(this.#timer);
    this.#socket?.close();
  }

  send(message) {
    if (this.#socket?.readyState === WebSocket.OPEN) this.#socket.send(JSON.stringify(message));
  }

  #open() {
    this.#key = this.#api.key;
    const socket = new WebSocket(this.#api.socketUrl(this.session, this.lastIndex, this.#eventsAfter));
    socket.binaryType = "arraybuffer";
    this.#socket = socket;
    this.#announced = this.#last = null;
    socket.onmessage = ({ data }) => {
      if (this.#closed || socket !== this.#socket) return;
      if (typeof data === "string") this.#json(JSON.parse(data));
      else this.#binary(data);
    };
    socket.onclose = ({ code }) => {
      if (!this.#closed && socket === this.#socket) this.#ended(code);
    };
  }

  #json(message) {
    switch (message.type) {
      case "hello":
        this.#failures = 0;
        this.#newestEvent = message.newest_event;
        this.#on.hello(message);
        break;
      case "skip":
        this.#on.skip(message);
        break;
      case "init":
      case "chunk":
        this.#announced = message;
        break;
      case "error":
        this.#last = message;
        if (message.id) this.#on.problem(this.#api.problem(message, this.#key));
        break;
      case "end":
        this.#closed = true;
        this.#on.end(message);
        break;
      case "pong":
      case "receipt":
        break;
      default:
        this.#eventsAfter = message.sequence;
        this.#on.event(message, message.sequence > this.#newestEvent);
    }
  }

  #binary(data) {
    const what = this.#announced;
    this.#announced = null;
    if (what?.type === "init") this.#on.init(what, data);
    if (what?.type !== "chunk") return;
    if (this.lastIndex !== null && what.index !== this.lastIndex + 1) {
      // Never show a gap or a repeat: ask again for what comes next.
      this.#socket.close();
      return;
    }
    this.lastIndex = what.index;
    this.#on.chunk(what, data);
  }

  #ended(code) {
    const problem = this.#last && this.#api.problem(this.#last, this.#key);
    if (FOR_GOOD.has(code)) {
      this.#closed = true;
      this.#on.gone(problem);
      return;
    }
    if (code === 4410 && problem?.limit !== undefined) {
      this.lastIndex = Number(problem.limit) - 1;
      this.#on.problem(problem);
    } else if (code === 4422) {
      this.lastIndex = null;
    }
    const wait = Math.min(LONGEST_WAIT_MS, FIRST_WAIT_MS * 2 ** this.#failures) * (0.75 + Math.random() / 2);
    this.#failures += 1;
    const waitMs = Math.max(wait, code === 1013 ? (problem?.retryAfterS ?? 0) * 1000 : 0);
    this.#on.lost(waitMs);
    this.#timer = setTimeout(() => this.#open(), waitMs);
  }
}
