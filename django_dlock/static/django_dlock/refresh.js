/* Keeps the list of held locks fresh: fetches this very page and takes its list over. */
"use strict";

(function () {
    function start() {
        const box = document.getElementById("dlock-refresh");
        if (!box) {
            return;
        }
        const button = box.querySelector(".dlock-refresh-pause");
        const time = box.querySelector(".dlock-refresh-time");
        const failure = box.querySelector(".dlock-refresh-failure");
        const text = box.dataset;
        let paused = false;

        function tellTime() {
            time.textContent = text.updated + " " + new Date().toLocaleTimeString();
        }

        function takeOver(page) {
            const fresh = page.getElementById("changelist-form");
            const list = document.getElementById("changelist-form");
            if (!fresh || !list) {
                // The login page, most likely: the session has ended.
                throw new Error("no list in the answer");
            }
            // A keyboard user stays on the link that they are on, if it still exists.
            const active = document.activeElement;
            const href = list.contains(active) ? active.getAttribute("href") : null;
            const results = list.querySelector(".results");
            const scrolled = results ? results.scrollLeft : 0;
            list.replaceChildren(...fresh.childNodes);
            if (href) {
                const same = Array.from(list.querySelectorAll("a[href]"))
                    .find((link) => link.getAttribute("href") === href);
                if (same) {
                    same.focus({preventScroll: true});
                }
            }
            if (list.querySelector(".results")) {
                list.querySelector(".results").scrollLeft = scrolled;
            }
        }

        async function refresh() {
            if (!paused && !document.hidden) {
                try {
                    const answer = await fetch(window.location.href, {cache: "no-store"});
                    if (!answer.ok) {
                        throw new Error(answer.status);
                    }
                    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
                    if (!paused) {
                        takeOver(page);
                        tellTime();
                    }
                    failure.textContent = "";
                } catch {
                    failure.textContent = text.failed;
                }
            }
            window.setTimeout(refresh, Number(text.seconds) * 1000);
        }

        button.addEventListener("click", function () {
            paused = !paused;
            button.setAttribute("aria-pressed", String(paused));
            button.textContent = paused ? text.resume : text.pause;
        });
        box.hidden = false;
        tellTime();
        window.setTimeout(refresh, Number(text.seconds) * 1000);
    }

    if (document.readyState === "loading") {
        document.addEventListener("DOMContentLoaded", start);
    } else {
        start();
    }
})();
