//! The dashboard: static pages over the API, embedded in the binary.
//!
//! One document, a style sheet and scripts without a build chain, which use the API like any other client. They contain
//! no secrets, so any client may fetch them; the API authenticates what they display. Names and logs come from
//! untrusted nodes, so the Content-Security-Policy sent with the document allows no scripts but these, from this
//! origin.

use axum::{
    Router,
    extract::Request,
    http::{HeaderValue, header},
    routing::get,
};

use super::response::{RawBody, SharedResponse};

/// The Content-Security-Policy of the page: nothing that is not listed.
const CONTENT_SECURITY_POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri \
                       'none'; form-action 'none'; frame-ancestors 'none'";

const HTML: &str = "text/html; charset=utf-8";
const CSS: &str = "text/css; charset=utf-8";
const SCRIPT: &str = "text/javascript; charset=utf-8";
const SVG: &str = "image/svg+xml";

/// A file of the dashboard: path, content type and content.
type File = (&'static str, &'static str, &'static str);

macro_rules! files {
    ($($name:literal: $kind:expr,)*) => {
        [$((concat!("/assets/", $name), $kind, include_str!(concat!("../../assets/", $name))),)*]
    };
}

const PAGE: &str = include_str!("../../assets/index.html");

/// Every file the page loads. A test compares this list with the folder.
const FILES: [File; 28] = files![
    "actions.js": SCRIPT,
    "api.js": SCRIPT,
    "app.js": SCRIPT,
    "attention.js": SCRIPT,
    "charts.js": SCRIPT,
    "colours.js": SCRIPT,
    "components.js": SCRIPT,
    "csv.js": SCRIPT,
    "dom.js": SCRIPT,
    "event-stream.js": SCRIPT,
    "fleet-model.js": SCRIPT,
    "fleet-view.js": SCRIPT,
    "format.js": SCRIPT,
    "icon.svg": SVG,
    "log-viewer.js": SCRIPT,
    "node-map.js": SCRIPT,
    "pages/attention.js": SCRIPT,
    "pages/audit.js": SCRIPT,
    "pages/budget.js": SCRIPT,
    "pages/cases.js": SCRIPT,
    "pages/coverage.js": SCRIPT,
    "pages/fleet.js": SCRIPT,
    "pages/node.js": SCRIPT,
    "pages/plan.js": SCRIPT,
    "pages/tests.js": SCRIPT,
    "style.css": CSS,
    "table.js": SCRIPT,
    "theme.js": SCRIPT,
];

/// Returns the routes of the dashboard. Each file is compressed once, here.
pub(super) fn routes() -> Router {
    let page: File = ("/", HTML, PAGE);
    FILES.into_iter().chain([page]).fold(Router::new(), |router, (path, kind, text)| {
        let shared = SharedResponse::new(RawBody::text(kind, text.to_owned()));
        let send = move |request: Request| {
            let mut response = shared.respond_to(request.headers());
            response
                .headers_mut()
                .insert(header::CONTENT_SECURITY_POLICY, HeaderValue::from_static(CONTENT_SECURITY_POLICY));
            async { response }
        };
        router.route(path, get(send))
    })
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs, path::Path};

    use doctor_core::finding::Severity;

    use super::*;

    fn files_under(folder: &Path, before: &str, into: &mut BTreeSet<String>) {
        for entry in fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            let name = format!("{before}{}", entry.file_name().to_str().unwrap());
            if entry.file_type().unwrap().is_dir() {
                files_under(&entry.path(), &format!("{name}/"), into);
            } else {
                into.insert(name);
            }
        }
    }

    #[test]
    fn every_asset_file_is_served_and_no_other_is_listed() {
        let mut expected = BTreeSet::new();
        files_under(&Path::new(env!("CARGO_MANIFEST_DIR")).join("assets"), "/assets/", &mut expected);
        assert!(expected.remove("/assets/index.html"));
        let served: BTreeSet<String> = FILES.iter().map(|(path, ..)| (*path).to_owned()).collect();
        assert_eq!(served, expected);
    }

    #[test]
    fn severity_meanings_in_the_scripts_match_the_program() {
        let script = include_str!("../../assets/format.js");
        let (_, rest) = script.split_once("export const SEVERITIES = {\n").unwrap();
        let (table, _) = rest.split_once("};\n").unwrap();
        let row = |severity: &Severity| format!("  {}: \"{}\",\n", severity.code(), severity.meaning());
        assert_eq!(table, Severity::ALL.iter().map(row).collect::<String>());
        for (path, _, text) in FILES.into_iter().filter(|(path, ..)| *path != "/assets/format.js") {
            assert!(!text.contains("\"isolate\""), "{path} has a list of severities of its own");
        }
    }

    #[test]
    fn scripts_neither_build_html_from_text_nor_contact_another_host() {
        for (path, _, text) in FILES.into_iter().chain([("/", HTML, PAGE)]) {
            for pattern in
                ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function", "srcdoc"]
            {
                assert!(!text.contains(pattern), "{path} uses {pattern}");
            }
            let hosts: Vec<&str> = text.split("://").skip(1).collect();
            assert!(hosts.iter().all(|host| host.starts_with("www.w3.org/2000/svg")), "{path} names another host");
        }
        // The policy would block these.
        for inline in ["<style", "style=", "<script>", " onclick"] {
            assert!(!PAGE.contains(inline), "{inline}");
        }
    }
}
