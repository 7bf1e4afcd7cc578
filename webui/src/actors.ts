import { signal } from "@preact/signals";
import { ApiError, get } from "./api";
import type { Page } from "./model";

// Who did something, by name: events carry the id of a token. Only an administrator may list tokens;
// for others the ids stay, and that is no error of the page.

interface Token {
  id: string;
  name: string;
}

export const tokenNames = signal<ReadonlyMap<string, string>>(new Map());

export async function loadTokenNames(): Promise<void> {
  try {
    const page = await get<Page<Token>>("/v1/tokens?limit=200");
    tokenNames.value = new Map(page.items.map((token) => [token.id, token.name]));
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
  }
}

export function actorName(actor: string, names: ReadonlyMap<string, string>): string {
  const id = actor.startsWith("token/") ? actor.slice("token/".length) : null;
  const name = id === null ? undefined : names.get(id);
  return name === undefined ? actor : `token ${name}`;
}
