// Browsers refuse workers to a page that is opened from a disk. There, the theme's search runs in a hidden frame.
// The theme takes the polyfill whose name contains "iframe-worker" and looks for the global `IFrameWorker`.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      this.inside = frame.contentWindow
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      this.inside.importScripts = async (...urls) => {
        for (const each of urls) await this.load(each)
      }
      this.ready = this.load(url)
    }

    load(url) {
      const script = this.inside.document.createElement("script")
      const loaded = new Promise((resolve, reject) => {
        script.onload = resolve
        script.onerror = () => reject(new Error(`cannot load ${url}`))
      })
      script.src = url
      this.inside.document.body.append(script)
      return loaded
    }

    async postMessage(data) {
      await this.ready
      this.inside.dispatchEvent(new MessageEvent("message", { data }))
    }
  }
}
