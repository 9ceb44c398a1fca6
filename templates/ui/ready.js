// For pages that need no script: tells tests and scripts that the page is complete.
document.documentElement.dataset.ready = "";
