// Media Source Extensions: fragments in, playing video out. Times are seconds of media.
import { PlaybackError } from "./errors.js";
const START_CHUNKS = 2;
const START_S = 1.0;
const KEEP_BEHIND_S = 30;
const TRIM_BEHIND_S = 60;
export class Playback {
    stalled;
    started;
    // onError: nothing more will be played before the next `reset`.
    constructor(video, onChange, onFirstFrame, onError) {
        this.stalled = false;
        this.started = false;
        this.#video = video;
        this.#onChange = onChange;
        this.#onFirstFrame = onFirstFrame;
        this.#onError = onError;
        for (const name of ["waiting", "playing", "pause", "timeupdate"]) {
            video.addEventListener(name, () => this.#look());
        }
        // A full buffer has room again some time after it was played.
        video.addEventListener("timeupdate", () => this.#queue.length && this.#pump());
        video.addEventListener("error", () => video.error && this.#fail(video.error));
        this.reset();
    }
    #video;
    #onChange;
    #onFirstFrame;
    #onError;
    #failed = false;
    #source = null;
    #buffer = null;
    #queue = [];
    #chunks = 0;
    #wanted = true;
    #startAt = 0;
    #skipTo = null;
    reset() {
        this.#queue = [];
        this.#buffer = null;
        this.#chunks = 0;
        this.#skipTo = null;
        this.started = this.stalled = this.#failed = false;
        // Of a source that never opened.
        if (this.#video.src)
            URL.revokeObjectURL(this.#video.src);
        const Source = globalThis.ManagedMediaSource ?? globalThis.MediaSource;
        this.#source = Source ? new Source() : null;
        if (!this.#source)
            return;
        this.#video.disableRemotePlayback = true;
        const address = URL.createObjectURL(this.#source);
        this.#video.src = address;
        this.#source.addEventListener("sourceopen", () => {
            // A source that has an address is never collected.
            URL.revokeObjectURL(address);
            this.#pump();
        });
    }
    /** Leave the `<video>` to another playback. */
    release() {
        this.#queue = [];
        this.#source = this.#buffer = this.#skipTo = null;
        this.#chunks = 0;
        this.started = this.stalled = false;
        if (this.#video.src)
            URL.revokeObjectURL(this.#video.src);
        this.#video.removeAttribute("src");
        this.#video.load();
    }
    get supported() {
        return this.#source !== null;
    }
    // Where playback is: before the first frame, where it will begin.
    get playhead() {
        return this.started ? this.#video.currentTime : this.#startAt;
    }
    // How much can be played on without another chunk.
    get ahead() {
        const at = this.playhead;
        const ranges = this.#video.buffered;
        for (let n = 0; n < ranges.length; n++) {
            if (ranges.start(n) <= at + 0.1 && at < ranges.end(n))
                return ranges.end(n) - at;
        }
        return 0;
    }
    get wanted() {
        return this.#wanted;
    }
    beginAt(seconds) {
        if (!this.#chunks)
            this.#startAt = seconds;
    }
    init(message, data) {
        this.#queue.push({ mime: message.mime, data });
        this.#pump();
    }
    chunk(message, data) {
        if (!this.#chunks)
            this.#startAt = Math.max(this.#startAt, message.start_s);
        this.#chunks += 1;
        this.#queue.push({ data, end: message.start_s + message.duration_s });
        this.#pump();
    }
    // The video before `seconds` is not to be shown any more. Playback goes on there once that chunk is here.
    skip(seconds) {
        this.#queue = this.#queue.filter(({ mime, end }) => mime || end === true || end > seconds + 0.01);
        if (!this.started)
            this.#startAt = Math.max(this.#startAt, seconds);
        this.#skipTo = seconds;
    }
    play() {
        this.#wanted = true;
        this.#look();
        if (this.started)
            this.#video.play().catch(() => { });
    }
    pause() {
        this.#wanted = false;
        this.#video.pause();
        this.#look();
    }
    finish() {
        this.#queue.push({ end: true });
        this.#pump();
    }
    #pump() {
        if (this.#failed || this.#source?.readyState !== "open" || this.#buffer?.updating)
            return;
        const next = this.#queue[0];
        if (!next) {
            this.#look();
            return;
        }
        try {
            if (next.end === true) {
                this.#queue.shift();
                if (this.#buffer)
                    this.#source.endOfStream();
                this.#look();
                return;
            }
            if (next.mime)
                this.#prepare(next.mime);
            this.#buffer.appendBuffer(next.data);
            this.#queue.shift();
        }
        catch (error) {
            if (error.name !== "QuotaExceededError")
                this.#fail(error);
            // What was not played yet must stay: the fragment waits for room.
            else if (!this.#trim(5) && !this.started)
                this.#fail(error);
        }
    }
    #fail(cause) {
        // Without a source, another playback has the `<video>`.
        if (this.#failed || !this.#source)
            return;
        this.#failed = true;
        this.#queue = [];
        this.#onError(new PlaybackError(`this browser cannot play the video: ${cause.message}`, { cause }));
    }
    #prepare(mime) {
        if (this.#buffer) {
            this.#buffer.changeType(mime);
            return;
        }
        const buffer = this.#source.addSourceBuffer(mime);
        this.#buffer = buffer;
        buffer.mode = "segments";
        buffer.addEventListener("updateend", () => {
            // `reset` has put another one in its place, or an error has closed the source.
            if (buffer !== this.#buffer || this.#source.readyState === "closed")
                return;
            // While more waits, too: of an ended session, all of the video may come at once.
            this.#look();
            if (!this.#trimIfLong())
                this.#pump();
        });
    }
    #trimIfLong() {
        const ranges = this.#buffer.buffered;
        return ranges.length > 0 && this.playhead - ranges.start(0) > TRIM_BEHIND_S && this.#trim(KEEP_BEHIND_S);
    }
    #trim(keepS) {
        const until = this.playhead - keepS;
        const { buffered, updating } = this.#buffer;
        if (updating || !buffered.length || buffered.start(0) > until - 0.1)
            return false;
        this.#buffer.remove(0, until);
        return true;
    }
    #leapSkip() {
        const ranges = this.#video.buffered;
        for (let n = 0; n < ranges.length; n++) {
            if (ranges.start(n) > this.#skipTo + 0.1 || ranges.end(n) < this.#skipTo + 0.1)
                continue;
            if (this.#video.currentTime < this.#skipTo)
                this.#video.currentTime = this.#skipTo;
            if (!this.#buffer.updating)
                this.#buffer.remove(0, this.#skipTo);
            this.#skipTo = null;
            return;
        }
    }
    #look() {
        const video = this.#video;
        if (this.started && this.#skipTo !== null && this.#source.readyState !== "closed")
            this.#leapSkip();
        if (!this.started && this.#wanted && this.#chunks && !this.#buffer?.updating) {
            const enough = this.ahead >= START_S || (this.#chunks >= START_CHUNKS && this.ahead > 0);
            if (enough || this.#source.readyState === "ended") {
                this.started = true;
                this.#watchFirstFrame();
                video.currentTime = this.#startAt;
                video.play().catch(() => { });
            }
        }
        if (!this.started && !this.#wanted && this.ahead > 0 && video.currentTime < this.#startAt) {
            video.currentTime = this.#startAt; // A paused session shows where it stopped.
        }
        if (this.started && this.#wanted) {
            this.#leapGap();
            this.#waitAtEnd();
            if (video.paused && !video.ended && this.ahead > 0)
                video.play().catch(() => { });
        }
        const stalled = this.started && this.#wanted && this.ahead < 0.1 && this.#source.readyState === "open";
        if (stalled !== this.stalled)
            this.stalled = stalled;
        this.#onChange();
    }
    #watchFirstFrame() {
        const shown = () => this.#onFirstFrame();
        if (this.#video.requestVideoFrameCallback)
            this.#video.requestVideoFrameCallback(shown);
        else
            this.#video.addEventListener("playing", shown, { once: true });
    }
    // Chromium's clock does not stop at the end of live video without sound: what comes later would be late for good.
    #waitAtEnd() {
        const { buffered, currentTime } = this.#video;
        const end = buffered.length ? buffered.end(buffered.length - 1) : Infinity;
        if (currentTime > end && this.#source.readyState === "open")
            this.#video.currentTime = end;
    }
    // A rounded time stamp can leave a hole of a few microseconds, a gap in the log one of seconds.
    #leapGap() {
        const { buffered, currentTime } = this.#video;
        for (let n = 0; n < buffered.length; n++) {
            if (currentTime < buffered.start(n)) {
                if (n === 0 || currentTime >= buffered.end(n - 1) - 0.1)
                    this.#video.currentTime = buffered.start(n);
                return;
            }
        }
    }
}
