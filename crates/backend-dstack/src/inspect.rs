//! `doctor config check --live` on dstack: whether the server responds, who owns the token, what it may do in the project, and
//! whether there are fleets to manage. Changes nothing.

use serde_json::{Value, json};

use doctor_backend::inspection::InspectionItem;

use super::{
    api_types::{CurrentUser, Fleet, Project, ServerInfo},
    client::{Client, DstackApiError},
    config::{DstackConfig, KeyDelivery},
};

/// Inspects the server and the project.
pub fn inspect(config: &DstackConfig) -> Vec<InspectionItem> {
    let client = match config.check().map_err(|error| error.to_string()).and_then(|()| Client::new(config)) {
        Ok(client) => client,
        Err(error) => return vec![InspectionItem::bad("dstack", error, "see [backend.dstack]")],
    };
    let mut items = vec![server(&client, config)];
    let user: CurrentUser = match client.post("/api/users/get_my_user", &json!({})) {
        Ok(user) => user,
        Err(error) => {
            items.push(no_token(&error, config));
            return items;
        }
    };
    items.push(InspectionItem::good("token", format!("it belongs to {}", user.username)));
    items.push(rights(&client, config, &user));
    items.push(fleets(&client, config));
    items
}

fn server(client: &Client, config: &DstackConfig) -> InspectionItem {
    match client.post::<ServerInfo>("/api/server/get_info", &json!({})) {
        Ok(ServerInfo { server_version: Some(version) }) => {
            InspectionItem::good("dstack server", format!("{} answers; dstack {version}", config.url))
        }
        Ok(ServerInfo { server_version: None }) => {
            InspectionItem::unknown("dstack server", format!("{} answers but does not report its version", config.url))
        }
        Err(error) => InspectionItem::bad(
            "dstack server",
            error.to_string(),
            "check that `url` is the server's, and that it runs",
        ),
    }
}

fn no_token(error: &DstackApiError, config: &DstackConfig) -> InspectionItem {
    let remedy = match &config.token_file {
        Some(path) => format!("put the token of a member of the project into {}", path.display()),
        None => format!("set {} to the token of a member of the project, or `token_file`", config.token_variable),
    };
    match error {
        DstackApiError::Rejected { .. } | DstackApiError::NoToken(_) => {
            InspectionItem::bad("token", error.to_string(), remedy)
        }
        _ => InspectionItem::unknown("token", error.to_string()),
    }
}

/// Checks the role of the token's owner. Only managers may keep secrets.
fn rights(client: &Client, config: &DstackConfig, user: &CurrentUser) -> InspectionItem {
    const WHAT: &str = "project";
    let name = &config.project;
    let project: Project = match client.post(&format!("/api/projects/{name}/get"), &json!({})) {
        Ok(project) => project,
        Err(error @ DstackApiError::Rejected { .. }) => {
            return InspectionItem::bad(
                WHAT,
                error.to_string(),
                format!("make {} a member of project {name}", user.username),
            );
        }
        Err(error) => return InspectionItem::unknown(WHAT, error.to_string()),
    };
    let is_admin = user.global_role.as_deref() == Some("admin");
    let member = project.members.iter().find(|member| member.user.username == user.username);
    let role = member.map_or("none", |member| member.project_role.as_str());
    let manages = is_admin || matches!(role, "admin" | "manager");
    if config.key == KeyDelivery::Environment || manages {
        let text = if is_admin {
            format!("{} is a global admin", user.username)
        } else {
            format!("{} is {role} of {name}", user.username)
        };
        return if is_admin || member.is_some() {
            InspectionItem::good(WHAT, text)
        } else {
            InspectionItem::bad(WHAT, text, format!("make {} a member of project {name}", user.username))
        };
    }
    InspectionItem::bad(
        WHAT,
        format!("{} is {role} of {name} and may not create secrets there", user.username),
        "make it a manager of the project, or set `key = \"environment\"`",
    )
}

fn fleets(client: &Client, config: &DstackConfig) -> InspectionItem {
    const WHAT: &str = "fleets";
    let query = json!({ "project_name": config.project, "only_active": true, "limit": 100 });
    let fleets: Vec<Fleet> = match client.post::<Value>("/api/fleets/list", &query).map(serde_json::from_value) {
        Ok(Ok(fleets)) => fleets,
        Ok(Err(error)) => {
            return InspectionItem::bad(WHAT, format!("unexpected response: {error}"), "check the version of dstack");
        }
        Err(error) => return InspectionItem::unknown(WHAT, error.to_string()),
    };
    let missing = config.fleets.iter().find(|name| fleets.iter().all(|fleet| fleet.name != **name));
    if let Some(name) = missing {
        return InspectionItem::bad(
            WHAT,
            format!("there is no fleet {name} in {}", config.project),
            "correct `fleets`",
        );
    }
    let ours: Vec<&Fleet> =
        fleets.iter().filter(|fleet| config.fleets.is_empty() || config.fleets.contains(&fleet.name)).collect();
    let instances: usize = ours.iter().map(|fleet| fleet.instances.len()).sum();
    let names = ours.iter().map(|fleet| fleet.name.as_str()).take(8).collect::<Vec<_>>().join(", ");
    match instances {
        0 => InspectionItem::unknown(WHAT, format!("no fleet of {} has an instance", config.project)),
        1 => InspectionItem::good(WHAT, format!("1 instance in {names}")),
        count => InspectionItem::good(WHAT, format!("{count} instances in {names}")),
    }
}
