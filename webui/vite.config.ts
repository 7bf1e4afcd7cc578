import { defineConfig } from "vite";

// The build goes where the Python package expects the page; WEBUI_OUT is set by hatch_build.py.
export default defineConfig({
  base: "/",
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  build: {
    outDir: process.env["WEBUI_OUT"] ?? "../supervisor/_webui",
    emptyOutDir: true,
    assetsInlineLimit: 0, // the content security policy allows no data: URLs in scripts or styles
    target: "es2022",
  },
  server: { proxy: { "/v1": "http://127.0.0.1:8420" } },
});
