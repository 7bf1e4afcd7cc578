import { plainText } from "./format";

// Log bytes to lines, by byte offset, so that nothing is shown twice and nothing is lost between pieces.
// Keeps a ring of the newest lines; a line cut by the end of a piece waits for its rest.

export const MAX_LINES = 100_000;
const MAX_LINE_CHARACTERS = 4_000;

export class LogBuffer {
  lines: string[] = [];
  dropped = 0;
  nextOffset: number;
  private rest = "";
  private readonly decoder = new TextDecoder("utf-8", { fatal: false });

  constructor(startOffset: number) {
    this.nextOffset = startOffset;
  }

  // Returns how many whole lines were added. A piece that is not the next one is refused.
  add(data: Uint8Array, offset: number): number {
    if (offset !== this.nextOffset) throw new Error(`log piece at ${offset}, expected ${this.nextOffset}`);
    this.nextOffset += data.length;
    const parts = (this.rest + this.decoder.decode(data, { stream: true })).split("\n");
    this.rest = parts.pop() ?? "";
    for (const part of parts) this.lines.push(this.shown(part));
    const surplus = this.lines.length - MAX_LINES;
    if (surplus > 0) {
      this.lines.splice(0, surplus);
      this.dropped += surplus;
    }
    return parts.length;
  }

  // The unfinished last line, as it stands.
  get tail(): string | null {
    return this.rest === "" ? null : this.shown(this.rest);
  }

  private shown(line: string): string {
    const text = plainText(line);
    return text.length > MAX_LINE_CHARACTERS ? `${text.slice(0, MAX_LINE_CHARACTERS)} … (${text.length} characters)` : text;
  }
}
