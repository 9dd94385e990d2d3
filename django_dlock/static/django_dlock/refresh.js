/* The list of held locks: fetches this same page again and again, and replaces what has changed.
   Between two answers, it counts how old the list is. */
"use strict";

(function () {
    // django-grappelli has its own name for the form.
    const FORM = "#changelist-form, #grp-changelist-form";
    const LONGEST = 30000;

    function start() {
        const box = document.getElementById("dlock-refresh");
        const list = document.querySelector(FORM);
        if (!box || !list) {
            return;
        }
        const part = (name) => box.querySelector(".dlock-refresh-" + name);
        const text = box.dataset;
        let paused = false;
        let asking = false;
        let timer = 0;
        let clock = 0;
        let readAt = Date.now();
        let frame = null;
        let actedAt = Date.now();
        let stopped = false;
        let pointer = "";

        // -- what the page shows of time ------------------------------------------------

        function duration(seconds) {
            const whole = Math.floor(seconds);
            if (whole < 60) {
                return whole + "s";
            }
            if (whole < 3600) {
                return Math.floor(whole / 60) + "m " + whole % 60 + "s";
            }
            if (whole < 86400) {
                return Math.floor(whole / 3600) + "h " + Math.floor(whole % 3600 / 60) + "m";
            }
            return Math.floor(whole / 86400) + "d " + Math.floor(whole % 86400 / 3600) + "h";
        }

        function tick() {
            const ago = (Date.now() - readAt) / 1000;
            part("time").textContent = text.read.replace("%s", duration(ago));
            part("waiting").textContent = !paused && isBeingUsed() ? text.waiting : "";
            say("stopped", stopped && !paused ? text.stopped : "");
        }

        /* Without writing the same words again, which a screen reader would read out again. */
        function say(name, words) {
            if (part(name).textContent !== words) {
                part(name).textContent = words;
            }
        }

        // -- whether somebody is there ---------------------------------------------------

        /* Each request may prolong the session of somebody who has gone away. */
        function isLeftAlone() {
            return Date.now() - actedAt >= Number(text.idle) * 1000;
        }

        function noteAction() {
            actedAt = Date.now();
            if (stopped) {
                refresh();
            }
        }

        /* A browser also reports a pointer that rests while the page moves beneath it. */
        function notePointer(event) {
            const place = event.screenX + " " + event.screenY;
            if (place !== pointer) {
                pointer = place;
                noteAction();
            }
        }

        // -- a fresh list ---------------------------------------------------------------

        function isBeingUsed() {
            // A new list would lose the ticked boxes, the chosen action and the marked text.
            const marked = document.getSelection();
            return Boolean(
                list.querySelector(".action-select:checked, [name=action] option:not([value='']):checked")
                || list.querySelector("select:focus")
                || (marked && !marked.isCollapsed && marked.containsNode(list, true))
            );
        }

        const rowsOf = (form) => Array.from(form.querySelectorAll("#result_list tr"))
            .filter((row) => row.querySelector(".field-lock_name a"));
        // Their number and their addresses are always the same.
        const tilesOf = (form) => Array.from(form.querySelectorAll(".dlock-tile"));
        const locksOf = (form) => rowsOf(form)
            .map((row) => row.querySelector(".field-lock_name a").getAttribute("href")).join("\n");

        /* All but the rows and the token, which differs in every answer. */
        function frameOf(form) {
            const copy = form.cloneNode(true);
            copy.querySelectorAll("[name=csrfmiddlewaretoken]").forEach((field) => field.remove());
            tilesOf(copy).forEach((tile) => tile.remove());
            rowsOf(copy).forEach((row) => row.remove());
            return copy.innerHTML;
        }

        function takeOver(page, fresh) {
            const active = list.contains(document.activeElement) ? document.activeElement : null;
            const freshFrame = frameOf(fresh);
            if (frame === freshFrame && locksOf(list) === locksOf(fresh)) {
                const rows = rowsOf(fresh), tiles = tilesOf(fresh);
                rowsOf(list).forEach((row, number) => updateCells(row, rows[number]));
                tilesOf(list).forEach((tile, number) => {
                    tile.className = tiles[number].className;
                    update(tile, tiles[number]);
                });
            } else {
                list.replaceChildren(...fresh.childNodes);
            }
            frame = freshFrame;
            // A theme may show the number of locks outside the list.
            const marks = page.querySelectorAll(".dlock-pages");
            document.querySelectorAll(".dlock-pages").forEach((mark, number) => {
                if (marks[number] && !list.contains(mark)) {
                    mark.parentElement.replaceChildren(...marks[number].parentElement.childNodes);
                }
            });
            if (active && !active.isConnected) {
                focusAgain(active);
            }
        }

        function updateCells(row, fresh) {
            const cells = Array.from(fresh.children);
            Array.from(row.children).forEach((cell, number) => {
                if (cells[number]) {
                    update(cell, cells[number]);
                }
            });
        }

        function update(old, fresh) {
            if (old.innerHTML !== fresh.innerHTML) {
                old.replaceChildren(...fresh.childNodes);
            }
        }

        /* Keep the keyboard where it was: on the same link or field, if it still exists. */
        function focusAgain(active) {
            const same = Array.from(list.querySelectorAll(active.nodeName)).find(
                (one) => ["id", "href", "name", "value"].every(
                    (fact) => one.getAttribute(fact) === active.getAttribute(fact)
                )
            );
            if (same) {
                same.focus({preventScroll: true});
            }
        }

        const problemsOf = () => Array.from(list.querySelectorAll(".dlock-problem"))
            .map((problem) => problem.textContent.trim());

        /* Tells screen readers of outages that have begun or ended, and of nothing else. */
        function tellNews(before, failed) {
            const problems = problemsOf();
            const fresh = problems.filter((problem) => !before.includes(problem));
            if (fresh.length) {
                part("news").textContent = fresh.join(" ");
            } else if (failed || (before.length && !problems.length)) {
                part("news").textContent = text.recovered;
            }
        }

        // -- asking ----------------------------------------------------------------------

        async function ask() {
            const limit = new AbortController();
            const ends = window.setTimeout(() => limit.abort(), LONGEST);
            try {
                const answer = await fetch(
                    window.location.href, {cache: "no-store", signal: limit.signal}
                );
                if (!answer.ok) {
                    throw new Error(answer.status);
                }
                return new DOMParser().parseFromString(await answer.text(), "text/html");
            } finally {
                window.clearTimeout(ends);
            }
        }

        async function refresh() {
            window.clearTimeout(timer);
            if (document.hidden || asking) {
                return;
            }
            stopped = isLeftAlone();
            tick();
            if (stopped) {
                return;
            }
            if (!paused && !isBeingUsed()) {
                asking = true;
                const askedAt = Date.now();
                try {
                    const page = await ask();
                    const fresh = page.querySelector(FORM);
                    if (!fresh) {
                        // Probably the login page.
                        throw new Error("no list in the answer");
                    }
                    if (!paused && !isBeingUsed()) {
                        const before = problemsOf();
                        takeOver(page, fresh);
                        readAt = askedAt;
                        tellNews(before, part("failure").textContent !== "");
                    }
                    part("failure").textContent = part("tried").textContent = "";
                } catch {
                    // The same words each time, so that a screen reader says them once.
                    const since = new Date(readAt).toLocaleTimeString();
                    part("failure").textContent = text.failed.replace("%s", since);
                    part("tried").textContent =
                        text.tried.replace("%s", new Date(askedAt).toLocaleTimeString());
                }
                asking = false;
                tick();
            }
            plan();
        }

        /* Nothing is asked and counted while nobody sees the page. */
        function plan() {
            window.clearTimeout(timer);
            if (!document.hidden) {
                timer = window.setTimeout(refresh, Number(text.seconds) * 1000);
            }
        }

        function watchTheClock() {
            window.clearInterval(clock);
            if (!document.hidden) {
                tick();
                clock = window.setInterval(tick, 1000);
            }
        }

        for (const action of ["pointerdown", "keydown", "wheel", "touchstart"]) {
            document.addEventListener(action, noteAction, {passive: true, capture: true});
        }
        document.addEventListener("pointermove", notePointer, {passive: true, capture: true});
        // Of the window, because a refresh itself moves the focus within the page.
        window.addEventListener("focus", noteAction);
        document.addEventListener("visibilitychange", function () {
            if (!document.hidden) {
                // Somebody has come back to this tab.
                actedAt = Date.now();
            }
            watchTheClock();
            refresh();
        });
        window.addEventListener("pageshow", function (event) {
            // The page comes back from the browser's memory, as old as it was left.
            if (event.persisted) {
                refresh();
            }
        });
        part("pause").addEventListener("click", function (event) {
            paused = !paused;
            event.target.textContent = paused ? text.resume : text.pause;
            if (!paused) {
                refresh();
            }
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
        watchTheClock();
        plan();
    }

    /* A theme may show the filters within the form of its search: then they belong to that one. */
    function joinSearch() {
        for (const field of document.querySelectorAll("[form=dlock-narrow]")) {
            if (field.closest("form")) {
                field.removeAttribute("form");
                // That form has a button of its own.
                field.hidden = field.type === "submit";
            }
        }
    }

    function begin() {
        joinSearch();
        start();
    }

    if (document.readyState === "loading") {
        document.addEventListener("DOMContentLoaded", begin);
    } else {
        begin();
    }
})();
