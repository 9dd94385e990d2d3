/* Updates the list of held locks: fetches this same page and replaces the list. */
"use strict";

(function () {
    function start() {
        const box = document.getElementById("dlock-refresh");
        const list = document.getElementById("changelist-form");
        if (!box || !list) {
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
            if (!fresh) {
                // Probably the login page, because the session has ended.
                throw new Error("no list in the answer");
            }
            // Keep the keyboard focus on the same link, if it still exists.
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

        function isBeingChosen() {
            // A new list would lose the ticked boxes and the chosen action.
            return list.querySelector(".action-select:checked, [name=action] option:not([value='']):checked");
        }

        async function refresh() {
            if (!paused && !document.hidden && !isBeingChosen()) {
                try {
                    const answer = await fetch(window.location.href, {cache: "no-store"});
                    if (!answer.ok) {
                        throw new Error(answer.status);
                    }
                    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
                    if (!paused && !isBeingChosen()) {
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
        // The admin does this only for the rows that were loaded with the page.
        list.addEventListener("change", function (event) {
            const boxes = list.querySelectorAll(".action-select");
            for (const one of boxes) {
                if (event.target.id === "action-toggle") {
                    one.checked = event.target.checked;
                }
                one.closest("tr").classList.toggle("selected", one.checked);
            }
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
