// dimensions of size zero are cut like others
module @f attributes {mhlo.num_partitions = 8 : i32, mhlo.num_replicas = 1 : i32} {
  sdy.mesh @mesh = <["x"=2, "y"=4]>
  sdy.mesh @mesh_0 = <["_axis_0"=8]>
  func.func public @main(%arg0: tensor<0x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {"y"}]>}, %arg1: tensor<8x0xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"_axis_0"}, {}]>}) -> (tensor<0x8xf32> {sdy.sharding = #sdy.sharding<@mesh, [{"y"}, {}]>}, tensor<8x0xf32>) {
    return %arg0, %arg1 : tensor<0x8xf32>, tensor<8x0xf32>
  }
}
