// Receives the changes of one topic from the server, and says when the connection is lost.
//
// watch("/api/live/runs", cursor, onChange): onChange(data) is called for each change since `cursor` (null: everything).
// It returns a function that ends it.
// A hidden tab does not listen, because a browser opens only six connections to a server; when it is shown again it
// asks for what it missed.
const SILENCE_MS = 40_000; // the server sends something every 15 s

export function watch(url, cursor, onChange) {
  const note = document.getElementById("live");
  let source = null;
  let timer = 0;

  const say = (text, state) => {
    note.hidden = false;
    note.dataset.state = state;
    if (note.textContent !== text) note.textContent = text;
  };
  const heard = () => {
    say("Live", "live");
    clearTimeout(timer);
    timer = setTimeout(reconnect, SILENCE_MS);
  };

  function connect() {
    source = new EventSource(cursor ? `${url}${url.includes("?") ? "&" : "?"}since=${encodeURIComponent(cursor)}` : url);
    source.onopen = heard;
    source.addEventListener("ping", heard);
    source.onmessage = (event) => {
      heard();
      cursor = event.lastEventId || cursor;
      onChange(JSON.parse(event.data));
    };
    source.onerror = () => {
      clearTimeout(timer);
      if (source.readyState === EventSource.CLOSED) {
        // The server answered with an error: a new server has another token.
        say("Disconnected: open the address that `clustertrain ui` printed", "lost");
        timer = setTimeout(reconnect, 5_000);
      } else say("Connection lost, reconnecting…", "lost");
    };
  }
  function disconnect() {
    clearTimeout(timer);
    source?.close();
    source = null;
  }
  function reconnect() {
    disconnect();
    connect();
  }

  const onVisibility = () => {
    if (document.hidden) disconnect();
    else if (!source) connect();
  };
  document.addEventListener("visibilitychange", onVisibility);
  if (!document.hidden) connect();
  return () => {
    document.removeEventListener("visibilitychange", onVisibility);
    disconnect();
  };
}
