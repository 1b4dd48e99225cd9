# Cloud Scheduler starts a Cloud Run job that runs `weightbeam watch --once`. Watchers that overlap don't do the same work twice.

resource "google_cloud_run_v2_job" "watch" {
  count               = local.scheduled
  name                = "weightbeam-watch"
  location            = var.region
  deletion_protection = false

  template {
    task_count = 1

    template {
      service_account = google_service_account.watcher.email
      timeout         = "86400s" # it waits for its Dataflow jobs
      max_retries     = 0        # the next run goes on where this one stopped

      containers {
        image   = var.image
        command = ["weightbeam"]
        args    = ["watch", "--config", local.watch_config, "--once"]

        resources {
          limits = {
            cpu    = "2"
            memory = "4Gi"
          }
        }

        dynamic "env" {
          for_each = var.hub_token ? ["${google_secret_manager_secret.hub_token.id}/versions/latest"] : []

          content {
            name  = "WEIGHTBEAM_HF_TOKEN_SECRET"
            value = env.value
          }
        }

        dynamic "env" {
          for_each = var.publish_token ? [google_secret_manager_secret.publish_token.secret_id] : []

          content {
            name = "HF_TOKEN"

            value_source {
              secret_key_ref {
                secret  = env.value
                version = "latest"
              }
            }
          }
        }

        dynamic "env" {
          for_each = var.releases_webhook ? [google_secret_manager_secret.releases_webhook.secret_id] : []

          content {
            name = "RELEASES_WEBHOOK"

            value_source {
              secret_key_ref {
                secret  = env.value
                version = "latest"
              }
            }
          }
        }
      }
    }
  }

  depends_on = [google_secret_manager_secret_iam_member.hub_token, google_secret_manager_secret_iam_member.publish_token, google_secret_manager_secret_iam_member.releases_webhook, google_storage_bucket_iam_member.objects, google_storage_bucket_iam_member.runs]
}

resource "google_cloud_run_v2_job_iam_member" "scheduler" {
  count    = local.scheduled
  name     = google_cloud_run_v2_job.watch[0].name
  location = google_cloud_run_v2_job.watch[0].location
  role     = "roles/run.invoker"
  member   = google_service_account.scheduler.member
}

resource "google_cloud_scheduler_job" "watch" {
  count     = local.scheduled
  name      = "weightbeam-watch"
  region    = var.region
  schedule  = var.schedule
  time_zone = "Etc/UTC"

  http_target {
    http_method = "POST"
    uri         = "https://run.googleapis.com/v2/${google_cloud_run_v2_job.watch[0].id}:run"

    oauth_token {
      service_account_email = google_service_account.scheduler.email
    }
  }

  depends_on = [google_cloud_run_v2_job_iam_member.scheduler]
}
