import { describe, expect, it } from "vitest";
import { actorName } from "./actors";

describe("actors", () => {
  it("are called by the token's name", () => {
    expect(actorName("token/t1", new Map([["t1", "admin"]]))).toBe("token admin");
  });
  it("keep their id where the name is not known, and other actors their word", () => {
    expect(actorName("token/t2", new Map([["t1", "admin"]]))).toBe("token/t2");
    expect(actorName("policy", new Map([["policy", "x"]]))).toBe("policy");
  });
});
